"""Routing of requests: `rlcanary.grpo.engines`, over actors that answer as vLLM does."""

from types import SimpleNamespace

from rlcanary.contract.batch import Completion
from rlcanary.grpo.engines import router
from rlcanary.grpo.engines.engine_pool import EnginePool, RequestFailed


class LoadAwareRouter:
    """A router whose slots are told by replica and place."""

    def __init__(self, num_replicas, max_concurrent_per_replica):
        self._router = router.LoadAwareRouter(num_replicas, max_concurrent_per_replica)
        self._held = {}

    async def acquire_slot(self):
        """Wait for a slot -> its replica and place."""
        slot = await self._router.acquire_slot()
        self._held[slot.replica, slot.slot] = slot
        return slot.replica, slot.slot

    async def release_slot(self, replica_idx, slot_idx):
        """Free a slot."""
        self._router.release(self._held.pop((replica_idx, slot_idx)))

    def get_load(self):
        """Count the requests of each replica."""
        return self._router.loads


class VLLMHandle:
    """A pool of engines. The names with an underscore are those that the tests look at."""

    def __init__(self, actors, name="vllm", max_concurrent_per_replica=8):
        self.name, self.num_replicas = name, len(actors)
        self._pool = EnginePool([_Engine(actor) for actor in actors], slots=max_concurrent_per_replica)
        self._paused, self._in_flight_zero = self._pool._open, self._pool._idle

    @property
    def _in_flight(self):
        return len(self._pool._requests)

    def get_replica_loads(self):
        """Count the requests of each replica."""
        return self._pool._router.loads

    async def generate_single(self, prompt, **sampling_params):
        """Sample from one prompt."""
        try:
            return SimpleNamespace(outputs=await self._pool.agenerate(prompt, sampling_params))
        except RequestFailed as error:
            raise RuntimeError(str(error)) from error

    async def stop(self):
        """Hold requests back and wait for those in progress."""
        self._pool.pause()
        await self._pool.drain()

    def resume(self):
        """Let requests through again."""
        self._pool.resume()


class _Engine:
    """The engine behind an actor."""

    version = 0

    def __init__(self, actor):
        self._actor = actor

    async def agenerate(self, prompt, sampling):
        (response,) = await self._actor.generate.remote([prompt], **sampling)
        return [
            Completion(output.token_ids, finish_reason=output.finish_reason, text=output.text)
            for output in response.outputs
        ]
