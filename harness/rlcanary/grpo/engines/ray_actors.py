"""Run engines as Ray actors, on one machine or several: started together, ended together, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcanary.cleanup.ray_start import start_ray
from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import Engine
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.engines.engine_pool import EngineDied, EnginesLost, RequestRefused
from rlcanary.grpo.plan.plan import Runtime, SamplerRole
from rlcanary.grpo.sync.sync import Endpoint, Expected
from rlcanary.grpo.sync.transports import Transport

if TYPE_CHECKING:
    from torch import Tensor

# Engines answer together; a further call, such as one of weight sync, has to find a place beside them.
SPARE_CALLS = 8
# Before the words of such an error that an actor raised.
OF_USERS = f"{UserError.__module__}.{UserError.__qualname__}: "


class EngineActor:
    """Runs one engine, and its endpoint, in a Ray actor."""

    def __init__(self, role: SamplerRole, sampling: Sampling, dtype: str, folder: Path) -> None:
        from rlcanary.grpo.engines.one_engine import start_engine

        self._stack = ExitStack()
        self.engine, self.endpoint = self._stack.enter_context(start_engine(role, sampling, dtype, folder))

    async def ready(self) -> None:
        """Answer once the engine has started."""

    async def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Sample as `Engine.agenerate` does."""
        return await self.engine.agenerate(prompt, sampling)

    async def expected(self) -> dict[str, Expected]:
        """Return the parameters as `Endpoint.expected` does."""
        return dict(self.endpoint.expected())

    async def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        """Load weights as `Endpoint.receive` does, while requests are answered."""
        return await asyncio.to_thread(self.endpoint.receive, transport, parcel)

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache as `Endpoint.reset_prefix_cache` does."""
        self.endpoint.reset_prefix_cache()

    async def set_version(self, version: int) -> None:
        """Set the version that tokens are tagged with."""
        self.endpoint.version = version

    async def stop(self) -> None:
        """End the engine's processes."""
        self._stack.close()


class RemoteEngine:
    """An engine in an actor, with its endpoint: an `Engine` and an `Endpoint`."""

    def __init__(self, actor: Any, timeout_s: float) -> None:
        """Wrap an actor; a call of weight sync that takes longer than `timeout_s` has failed."""
        self.actor = actor
        self._timeout_s = timeout_s
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._ask("set_version", version)
        self._version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        import ray

        found: list[list[Completion]] = ray.get([self.actor.generate.remote(prompt, sampling) for prompt in prompts])
        return found

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        with _errors_in_one_line():
            completions: list[Completion] = await self.actor.generate.remote(prompt, sampling)
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from rlcanary.grpo.sync.transports import RayTransport

        transport = RayTransport()
        with transport.send(list(weights)) as parcel:
            return set(self.receive(transport, parcel))

    def expected(self) -> Mapping[str, Expected]:
        expected: dict[str, Expected] = self._ask("expected")
        return expected

    def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        loaded: dict[str, str] = self._ask("receive", transport, parcel)
        return loaded

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache")

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        with _errors_in_one_line():
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=self._timeout_s)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Shorten Ray's long descriptions of an actor that died, and of a request that its engine refused, to one line.

    Raises:
        EngineDied: the actor is gone.
        RequestRefused: the engine refused the request.
    """
    import ray

    try:
        yield
    except ray.exceptions.ActorDiedError as error:
        raise EngineDied(str(error).partition("\n")[0]) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RequestRefused):
            raise RequestRefused(str(error.cause)) from error
        raise


@contextmanager
def connected(role: SamplerRole, runtime: Runtime) -> Iterator[None]:
    """Connect to a plan's Ray cluster: the caller's, the one at `runtime.address`, or one of the run's own.

    Raises:
        UserError: Ray is missing, no cluster is at the address, or it has not the CPUs that the sampler asks for.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(f"runtime.kind is ray, which is not installed ({error})") from error
    needed = role.replicas * role.cpus
    is_own, address = not ray.is_initialized(), runtime.address
    if is_own:
        cluster: dict[str, Any] = {"address": address}
        if not address:
            # Verifiers ask for no CPU.
            cluster = {"address": "local", "num_cpus": max(1, round(needed)), "include_dashboard": False}
        try:
            start_ray(
                lambda: ray.init(**cluster, logging_level="error", log_to_driver=False), limit_s=runtime.start_timeout_s
            )
        except ConnectionError as error:
            raise UserError(f"runtime.address is {address}, where no Ray cluster answers: {error}") from error
    try:
        there = ray.cluster_resources().get("CPU", 0.0)
        if there < needed:
            raise UserError(
                f"roles.sampler asks for {role.replicas} replicas of {role.cpus} cpus, but the Ray cluster has {there:g}"
            )
        yield
    finally:
        if is_own:
            ray.shutdown()


@contextmanager
def start_on_ray(
    role: SamplerRole, runtime: Runtime, sampling: Sampling, dtype: str, folder: Path
) -> Iterator[tuple[Sequence[Engine], Sequence[Endpoint]]]:
    """Start one actor per replica of the sampler, on the cluster that this process is connected to.

    Args:
        role: the engines and their number.
        runtime: its time limits are used.
        sampling: the seed of the engines, and the kind of logprobs that they return.
        dtype: dtype of the model, such as "bfloat16".
        folder: folder of the model, visible to every node.

    Raises:
        EnginesLost: an engine did not start, or not within the limit of `runtime`.
    """
    import ray

    actors: list[Any] = []
    try:
        remote = ray.remote(EngineActor)
        for _ in range(role.replicas):
            options = {"num_cpus": role.cpus, "max_concurrency": role.slots + SPARE_CALLS}
            actors.append(remote.options(**options).remote(role, sampling, dtype, folder))
        try:
            ray.get([actor.ready.remote() for actor in actors], timeout=runtime.start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            limit = f"{runtime.start_timeout_s:g} seconds (runtime.start_timeout_s)"
            raise EnginesLost(f"the engines did not start within {limit}") from None
        except ray.exceptions.ActorDiedError as error:
            # Ray tells the actor's traceback, which ends with the error.
            *_, told = str(error).strip().splitlines()
            raise EnginesLost(f"an engine did not start: {told.removeprefix(OF_USERS)}") from None
        engines = [RemoteEngine(actor, runtime.sync_timeout_s) for actor in actors]
        yield engines, engines
    finally:
        for actor in actors:
            _end(actor, runtime.sync_timeout_s)


def _end(actor: Any, timeout_s: float) -> None:
    """Ask the actor to end its engine, then end the actor; one that is gone already is ended."""
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(actor.stop.remote(), timeout=timeout_s)
    ray.kill(actor)
