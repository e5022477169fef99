"""Start the engines of the plan's role `sampler`, and the transport of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlcanary.contract.engine import Engine
from rlcanary.grpo.engines.one_engine import start_engine
from rlcanary.grpo.plan.models import save_model
from rlcanary.grpo.plan.plan import Plan
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
def start_samplers(plan: Plan, model: Any, tokenizer: Any) -> Iterator[Samplers]:
    """Start the samplers of a plan with the model's weights; end them afterwards, whatever happened.

    Args:
        plan: its roles and runtime. Engines read the model from its run's folder.
        model: the policy.
        tokenizer: decodes completions, without special tokens.
    """
    folder = plan.run.folder.absolute()
    save_model(model, tokenizer, folder / MODEL)
    if plan.runtime.kind == "ray":
        from rlcanary.grpo.engines.ray_actors import start_on_ray

        with start_on_ray(plan, folder / MODEL) as (engines, endpoints):
            yield Samplers(engines, endpoints, transport_of(plan.runtime.transport or "ray", folder))
        return
    default = "copy" if plan.roles.sampler.engine == "in_process" else "bytes"
    with start_engine(plan, folder / MODEL) as (engine, endpoint):
        yield Samplers([engine], [endpoint], transport_of(plan.runtime.transport or default, folder))


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a completion: those of the model's generation config and of the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    return tuple(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))
