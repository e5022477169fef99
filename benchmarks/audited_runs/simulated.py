"""Long runs, simulated from what an engine in bfloat16 made of one real run.

A short run is trained for real, and the engine's and the trainer's distribution of each token are kept. Then the tokens are
drawn anew from the engine's, many times over, and judged by the audit's own code: what its bets win in such updates makes
a pool, from which the updates of long runs are taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from audited_runs.training import PROFILES, Run
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import CollatedBatch
from rlcanary.live.bets import Bets
from rlcanary.live.record import Record
from rlcanary.live.sampling import BOUNDS, FIRST, Sampling


@dataclass
class Rollout:
    """The logprobs [B, T, V] of engine and trainer on a batch, at the temperature of the samples."""

    engine: Tensor
    trainer: Tensor
    mask: Tensor
    group_ids: Tensor


class Recorded(Run):
    """A run that keeps the distributions of engine and trainer of each rollout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rollouts: list[Rollout] = []

    def take(
        self, batch: CollatedBatch, advantages: Tensor, references: Tensor, before: Tensor, version: int | None
    ) -> None:
        if version is not None:
            models = (self.engine.model, self.state.model)
            engine, trainer = (_distributions(model, batch, self.sampling["temperature"]) for model in models)
            self.rollouts.append(Rollout(engine, trainer, batch.completion_mask, batch.group_ids))
        super().take(batch, advantages, references, before, version)


def _distributions(model: torch.nn.Module, batch: CollatedBatch, temperature: float) -> Tensor:
    """Compute the logprobs [B, T, V] of all tokens at the places of the completions."""
    with torch.no_grad():
        logits_BSV = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
        ).logits.double()
    places_BT = batch.completion_starts.unsqueeze(1) - 1 + torch.arange(batch.completion_mask.shape[1])
    rows_B1 = torch.arange(len(places_BT)).unsqueeze(1)
    return (logits_BSV[rows_B1, places_BT.clamp(max=logits_BSV.shape[1] - 1)] / temperature).log_softmax(-1)


class Noted(Bets):
    """Bets that note what they win."""

    def add(self, won: Tensor) -> Tensor:
        self.won = won
        return super().add(won)


def pool(rollouts: list[Rollout], draws: int, start: float | None, source: torch.Generator) -> dict[str, Tensor]:
    """Draw the tokens of rollouts anew, and judge them -> what each statement's bets win, [updates, 4] logarithms.

    Args:
        rollouts: of a real run.
        draws: times that each rollout is drawn.
        start: the engine's distance at the start of the run; None takes that of the first rollouts.
        source: of the draws.
    """
    sampling = Sampling()
    bets = {name: Noted(bound, len(BOUNDS)) for name, bound in BOUNDS.items()}
    sampling._bets.update(bets)
    if start is not None:
        sampling._at_start, sampling._open_at_start = [start] * FIRST, [1.0] * FIRST
    won: dict[str, list[Tensor]] = {name: [] for name in BOUNDS}
    for number in range(draws * len(rollouts)):
        rollout = rollouts[number % len(rollouts)]
        shape = rollout.mask.shape
        ids_BT1 = torch.multinomial(rollout.engine.exp().flatten(0, 1), 1, generator=source).view(*shape, 1)
        for _ in sampling.judge(_record(rollout, ids_BT1)):
            pass
        for name, each in bets.items():
            won[name].append(each.won)
    return {name: torch.stack(each) for name, each in won.items()}


def _record(rollout: Rollout, ids_BT1: Tensor) -> Record:
    engine_BT, trainer_BT = (each.gather(-1, ids_BT1)[..., 0] for each in (rollout.engine, rollout.trainer))
    return Record(
        0,
        None,
        trainer_BT,
        torch.zeros_like(trainer_BT),
        rollout.mask,
        sampler_logprobs=engine_BT,
        entropy=-(rollout.trainer.exp() * rollout.trainer).sum(-1),
        group_ids=rollout.group_ids,
        versions=torch.zeros(len(rollout.mask), dtype=torch.long),
        trainer_version=0,
    )


def alarms(pools: dict[str, Tensor], runs: int, updates: int, source: torch.Generator) -> dict[str, int]:
    """Count the runs with a finding, by statement and in all, of runs whose updates are drawn from a pool."""
    bets = {name: Bets(bound, len(BOUNDS)) for name, bound in BOUNDS.items()}
    refuted = {name: torch.zeros(runs, dtype=torch.bool) for name in BOUNDS}
    for _ in range(updates):
        chosen = torch.randint(len(pools["away"]), (runs,), generator=source)
        for name, each in bets.items():
            refuted[name] |= each.add(pools[name][chosen])
    any_of_them = torch.stack(list(refuted.values())).any(dim=0)
    return {name: int(each.sum()) for name, each in refuted.items() if each.any()} | {"any": int(any_of_them.sum())}


def record(seed: int, length: int) -> list[Rollout]:
    """Train for real with an engine in bfloat16 -> its rollouts."""
    conventions, _ = PROFILES["GRPO"]
    run = Recorded(ReferenceAdapter(conventions), None, half=True, seed=seed)
    while len(run.trace) < length:
        run.step()
    return run.rollouts
