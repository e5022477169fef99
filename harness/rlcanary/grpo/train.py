"""GRPO, from top to bottom: sample, score, advantage, loss, step, sync.

How this differs from the paper (arXiv 2402.03300) is what the plan's conventions say; every formula is that of
`rlcanary.reference`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from rlcanary import reference
from rlcanary.batch import CollatedBatch, Group
from rlcanary.contract import Item
from rlcanary.grpo import samplers
from rlcanary.grpo.data import next_items
from rlcanary.grpo.plan import Plan
from rlcanary.grpo.run import Run, open_run
from rlcanary.grpo.sync import sync_weights
from rlcanary.grpo.trainer import accumulate_gradients, descend, policy_data, refresh_reference, select
from rlcanary.grpo.trainer import score as trainer_logprobs

Watcher = Callable[[int, Mapping[str, float]], None]


def train(plan: Plan, resume: bool = False, on_step: Watcher = lambda step, metrics: None) -> dict[str, float]:
    """Run a plan.

    Args:
        plan: of the run.
        resume: go on from the last checkpoint in the plan's folder.
        on_step: sees the metrics of each step.

    Returns:
        The metrics of the last step; empty if none was left to take.

    Raises:
        UserError: as `open_run`.
        SyncError, CheckpointError, FloatingPointError: what ended the run, with its log and checkpoints kept.
    """
    metrics: dict[str, float] = {}
    with open_run(plan, resume) as run:
        while run.step < plan.run.steps:
            metrics = take_step(run)
            run.log.log(run.step, metrics)
            on_step(run.step, metrics)
            run.step += 1
            if plan.run.checkpoint_every and run.step % plan.run.checkpoint_every == 0:
                run.save()
    return metrics


def take_step(run: Run) -> dict[str, float]:
    """One rollout, the updates on it, and the sync behind them -> metrics."""
    schedule, conventions, step = run.plan.schedule, run.plan.conventions, run.step
    items = next_items(run.data, schedule.prompts_per_step)

    with run.trace.span("sample", step=step):
        groups = asyncio.run(sample(run, items))
    with run.trace.span("score", step=step):
        groups = score(items, groups)
    batch, stats = reference.make_batch(
        groups, run.pad_token_id, schedule.seq_len_buckets, schedule.completion_len_buckets
    )
    before = None
    if conventions.old_logprobs == "trainer" and schedule.updates_per_step > 1:
        before = trainer_logprobs(run.state.model, batch, conventions, schedule)

    updates = []
    for rows in torch.arange(len(batch.rewards)).split(schedule.update_rows):
        chosen = select(batch, rows)
        with run.trace.span("advantage", step=step):
            given = policy_data(run.state, chosen, conventions, schedule, None if before is None else before[rows])
        with run.trace.span("loss", step=step):
            output = accumulate_gradients(run.state, chosen, given, conventions, schedule)
        with run.trace.span("step", step=step):
            moved = descend(run.state, conventions)
        updates.append({"loss": float(output.loss), **output.metrics, **moved})

    if schedule.refreshes_reference_after(step):
        refresh_reference(run.state)
    if schedule.syncs_after(step):
        with run.trace.span("sync", step=step):
            sync_weights(run.state.model, run.samplers.endpoints, run.samplers.transport)
    for item in items:
        run.data.mark_done(item.id)
    return {
        **{name: fmean(update[name] for update in updates) for name in updates[0]},
        **reward_metrics(groups),
        **length_metrics(batch, stats),
        "policy_version": run.samplers.engine.version,
        "epoch": run.data.epoch,
        **{f"seconds/{name}": seconds for name, seconds in run.trace.take_seconds().items()},
    }


async def sample(run: Run, items: Sequence[Item]) -> list[Group]:
    """Sample every prompt's completions, all prompts at once -> groups in the order of the items, not yet rewarded."""

    async def group(item: Item) -> Group:
        version = run.samplers.engine.version
        seed = samplers.request_seed(run.plan.run.seed, run.step, item.id)
        completions = await samplers.sample(run.samplers.engine, item.prompt_ids, run.plan, seed, run.eos_token_ids)
        unknown = [float("nan")] * len(completions)
        return Group(item.prompt_ids, completions, unknown, item_id=item.id, policy_version=version)

    return list(await asyncio.gather(*(group(item) for item in items)))


def score(items: Sequence[Item], groups: Sequence[Group]) -> list[Group]:
    """The groups with the rewards of their items; NaN where a verifier could not judge, which is not a zero."""
    from rlcanary.reference.scoring import score as score_completions

    scored = []
    for item, group in zip(items, groups, strict=True):
        texts = [completion.text or "" for completion in group.completions]
        scored.append(replace(group, rewards=score_completions([item] * len(texts), texts).tolist()))
    return scored


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the rewards that there are, and how many there are not."""
    rewards = [reward for group in groups for reward in group.rewards]
    scored = [reward for reward in rewards if reward == reward]
    stats = reference.RewardStats()
    for group in groups:
        stats.record(group.rewards, used=True)
    shares = stats.get_metrics()
    return {
        "reward": fmean(scored) if scored else float("nan"),
        "unscored": len(rewards) - len(scored),
        "groups_all_correct": shares["frac_all_correct"],
        "groups_all_wrong": shares["frac_all_wrong"],
    }


def length_metrics(batch: CollatedBatch, stats: reference.BatchStats) -> dict[str, float]:
    """Tokens and what ended them."""
    rows = len(stats.completion_lens)
    return {
        "tokens": float(batch.attention_mask.sum()),
        "completion_tokens": fmean(stats.completion_lens),
        "truncated": (stats.finish_reasons.get("length", 0) + stats.finish_reasons.get("clamped", 0)) / rows,
        "padding": stats.padding_fraction,
    }
