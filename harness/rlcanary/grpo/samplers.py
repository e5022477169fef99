"""The engines that sample, as the plan's role `sampler` says them, and how weights reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcanary.engine import Engine, InProcessEngine
from rlcanary.grpo.plan import Plan
from rlcanary.grpo.sync import Endpoint, InProcessEndpoint
from rlcanary.grpo.transports import Transport, transport_of


@dataclass
class Samplers:
    """Attributes:
    engines: the replicas.
    endpoints: one per engine, for weight sync.
    transport: how weights travel to them.
    """

    engines: Sequence[Engine]
    endpoints: Sequence[Endpoint]
    transport: Transport

    @property
    def version(self) -> int:
        """Weight syncs that were completed."""
        return self.endpoints[0].version


@contextmanager
def start_samplers(plan: Plan, model: Any, tokenizer: Any, folder: Path) -> Iterator[Samplers]:
    """The samplers of a plan, started with the model's weights; gone afterwards, whatever happened.

    Args:
        plan: its roles and runtime.
        model: the policy.
        tokenizer: decodes completions, without special tokens.
        folder: of the run, for what an engine reads from disk.
    """
    engine = InProcessEngine(model, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    yield Samplers([engine], [InProcessEndpoint(engine)], transport_of(plan.runtime.transport or "copy", folder))


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends a completion: the ids of the model's generation config and of the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    return tuple(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))
