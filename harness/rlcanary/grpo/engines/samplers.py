"""Start the engines of the plan's role `sampler`, and the transport of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcanary.contract.engine import Engine
from rlcanary.contract.sampling import Sampling
from rlcanary.grpo.engines.one_engine import start_engine
from rlcanary.grpo.plan.models import save_model
from rlcanary.grpo.plan.plan import Runtime, SamplerRole
from rlcanary.grpo.sync.sync import Endpoint
from rlcanary.grpo.sync.transports import Transport, transport_of

MODEL = "model"


@dataclass
class Samplers:
    """The replicas.

    Attributes:
        engines: take requests.
        endpoints: one per engine, for weight sync.
        transport: transport of weights to them.
    """

    engines: Sequence[Engine]
    endpoints: Sequence[Endpoint]
    transport: Transport

    @property
    def version(self) -> int:
        """Number of completed weight syncs."""
        return max(endpoint.version for endpoint in self.endpoints)


@contextmanager
def start_samplers(
    role: SamplerRole, runtime: Runtime, sampling: Sampling, folder: Path, model: Any, tokenizer: Any
) -> Iterator[Samplers]:
    """Start the samplers of a plan with the model's weights; end them afterwards, whatever happened.

    Args:
        role: the engines and their number.
        runtime: the place where they run, and the transport of weights to them.
        sampling: the seed of the engines, and the kind of logprobs that they return.
        folder: folder of the run, where the engines read the model.
        model: the policy.
        tokenizer: decodes completions, without special tokens.
    """
    folder = folder.absolute()
    save_model(model, tokenizer, folder / MODEL)
    dtype = str(model.dtype).removeprefix("torch.")
    if runtime.kind == "ray":
        from rlcanary.grpo.engines.ray_actors import start_on_ray

        with start_on_ray(role, runtime, sampling, dtype, folder / MODEL) as (engines, endpoints):
            yield Samplers(engines, endpoints, transport_of(runtime.transport or "ray", folder))
        return
    default = "copy" if role.engine == "transformers" else "bytes"
    with start_engine(role, sampling, dtype, folder / MODEL) as (engine, endpoint):
        yield Samplers([engine], [endpoint], transport_of(runtime.transport or default, folder))
