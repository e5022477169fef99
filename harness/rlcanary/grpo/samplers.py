"""The engines that sample, as the plan's role `sampler` says them, and how weights reach them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcanary.batch import Completion
from rlcanary.engine import Engine, InProcessEngine
from rlcanary.grpo.plan import Plan
from rlcanary.grpo.sync import Endpoint, InProcessEndpoint
from rlcanary.grpo.transports import Transport, transport_of


@dataclass
class Samplers:
    """Attributes:
    engine: takes requests, whatever stands behind it.
    endpoints: one per engine, for weight sync.
    transport: how weights travel to them.
    """

    engine: Engine
    endpoints: Sequence[Endpoint]
    transport: Transport


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
    yield Samplers(engine, [InProcessEndpoint(engine)], transport_of(plan.runtime.transport or "copy", folder))


async def sample(
    engine: Engine, prompt_ids: Sequence[int], plan: Plan, seed: int, eos_token_ids: Sequence[int]
) -> list[Completion]:
    """The completions of one prompt under the plan's sampling parameters."""
    parameters = replace(plan.sampling, num_return_sequences=plan.schedule.group_size, seed=seed)
    completions = await engine.agenerate(prompt_ids, parameters.with_ends(eos_token_ids).for_in_process())
    if len(completions) != plan.schedule.group_size:
        raise RuntimeError(f"{plan.schedule.group_size} completions were asked for, {len(completions)} came back")
    return completions


def request_seed(run_seed: int, step: int, item_id: Hashable) -> int:
    """The seed of a request: a run that is resumed draws what it would have drawn, and no two prompts draw alike."""
    return random.Random(f"{run_seed}/{step}/{item_id}").getrandbits(31)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends a completion: the ids of the model's generation config and of the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    return tuple(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))
