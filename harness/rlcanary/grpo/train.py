"""GRPO, from top to bottom: sample, score, advantage, loss, step, sync.

The plan's conventions set the differences from the paper (arXiv 2402.03300); every formula is that of
`rlcanary.reference`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from rlcanary import reference
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.grpo.engines.engine_pool import EnginesLost
from rlcanary.grpo.plan.plan import Plan
from rlcanary.grpo.rollout.buffer import Account, BufferClosed
from rlcanary.grpo.sync.sync import SyncError, sync_weights
from rlcanary.grpo.training.checkpoint import CheckpointError
from rlcanary.grpo.training.rollout import NothingSampled
from rlcanary.grpo.training.run import Run, open_run
from rlcanary.grpo.training.trainer import refresh_reference
from rlcanary.grpo.training.updates import Audit, NotOnPolicy, take_updates

# Errors that end a run. It can be resumed from its log and its checkpoints.
ENDINGS = (EnginesLost, NothingSampled, BufferClosed, SyncError, CheckpointError, FloatingPointError, NotOnPolicy)
Watcher = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        metrics: metrics of the last step; empty if none was left to take.
        account: the account of all groups of the run.
    """

    metrics: dict[str, float]
    account: Account


def train(plan: Plan, resume: bool = False, on_step: Watcher = lambda *_: None, audit: Audit | None = None) -> Outcome:
    """Run a plan.

    Args:
        plan: the run's plan.
        resume: resume from the last checkpoint in the plan's folder.
        on_step: sees the metrics of each step.
        audit: looks at the updates, as `rlcanary.live.Audit`; None for none.

    Raises:
        UserError: as `open_run`.
        EnginesLost, NothingSampled, BufferClosed, SyncError, CheckpointError, FloatingPointError, NotOnPolicy: the run
            ended (`ENDINGS`).
    """
    return asyncio.run(_train(plan, resume, on_step, audit))


async def _train(plan: Plan, resume: bool, on_step: Watcher, audit: Audit | None) -> Outcome:
    metrics: dict[str, float] = {}
    with open_run(plan, resume, audit) as run:
        run.rollout.start()
        try:
            while run.step < plan.run.steps:
                metrics = await take_step(run)
                run.log.log(run.step, metrics)
                on_step(run.step, metrics)
                run.step += 1
                if plan.run.checkpoint_every and run.step % plan.run.checkpoint_every == 0:
                    await run.save()
        finally:
            account = await run.rollout.close(run.step)
    return Outcome(metrics, account)


async def take_step(run: Run) -> dict[str, float]:
    """Take one step: a rollout, the updates on it, and the sync after them -> metrics.

    Samplers and verifiers go on while the trainer computes, where the schedule lets them.
    """
    schedule, conventions, state, step = run.plan.schedule, run.plan.conventions, run.state, run.step

    evaluation = await evaluate(run)

    # Sample and score. Completions are rewarded as they come back, while others are still being drawn.
    version = run.samplers.version
    with run.trace.span("sample", step=step):
        groups = await run.rollout.groups(version)
    trace_verifiers(run)
    buckets = schedule.seq_len_buckets, schedule.completion_len_buckets
    batch, stats = reference.make_batch(groups, run.pad_token_id, *buckets, mask_truncated=conventions.mask_truncated)
    batch = batch.to(state.model.device)
    span = partial(run.trace.span, step=step)
    is_on_policy = schedule.synced_before(step) and all(group.policy_version == version for group in groups)
    updates = await run.compute(
        *(take_updates, state, batch, conventions, schedule, span, is_on_policy),
        *(run.audit, version if schedule.synced_before(step) else None, run.plan.sampling.draws_freely),
    )

    if state.ref_model is not None and schedule.refreshes_reference_after(step):
        refresh_reference(state)
    if schedule.syncs_after(step):
        with run.trace.span("sync", step=step):
            async with run.collector.paused():
                sync_weights(state.model, run.live_endpoints, run.samplers.transport)
                run.note_sync()
    return {
        **{name: fmean(update[name] for update in updates) for name in updates[0]},
        **evaluation,
        **reward_metrics(groups),
        **length_metrics(batch, stats),
        **incidents(run),
        **({} if run.audit is None else run.audit.metrics()),
        **await run.rollout.report(step),
        "staleness": fmean(version - group.policy_version for group in groups),
        "policy_version": run.samplers.version,
        "epoch": run.collector.items.epoch,
        **{f"seconds/{name}": seconds for name, seconds in run.trace.take_seconds().items()},
    }


async def evaluate(run: Run) -> dict[str, float]:
    """Evaluate the policy on the held-out prompts, before the update of a step in which that is due."""
    settings, collector = run.plan.evaluation, run.evaluation
    if settings is None or collector is None or run.step % settings.every:
        return {}
    with run.trace.span("evaluation", step=run.step):
        # The epoch is part of the requests' seeds: a run that is resumed draws what it would have drawn.
        collector.items.epoch = run.step - 1
        collector.items.start_epoch()
        groups = await collector.collect(len(collector.items.items))
        for group in groups:
            collector.items.mark_done(group.item_id)
    failures = collector.items.failures()
    if not groups:
        raise NothingSampled(f"none of the items that are held out could be sampled and scored: {failures}")
    rewards = [reward for group in groups for reward in group.rewards]
    return {"evaluation/reward": fmean(rewards), "evaluation/failed": len(failures)}


def incidents(run: Run) -> dict[str, float]:
    """Count the failures that were recovered from while this step's groups were sampled."""
    counts = run.collector.counts
    taken: dict[str, float] = {
        "failed_requests": counts["failed request"],
        "aborted_requests": counts["aborted request"],
        **{f"verifier/{problem}": count for problem, count in run.verifiers.take_problems().items()},
    }
    counts.clear()
    return taken


def trace_verifiers(run: Run) -> None:
    """Write the spans of the calls to verifiers that run in processes of their own."""
    for name, span in run.verifiers.drain_spans():
        outcome = span.problem or "ok"
        run.trace.add("verify", span.began_s, span.seconds, outcome, step=run.step, verifier=name, worker=span.worker)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the mean reward, and the shares of groups that are all right and all wrong."""
    rewards = [reward for group in groups for reward in group.rewards]
    stats = reference.RewardStats()
    for group in groups:
        stats.record(group.rewards, used=True)
    shares = stats.get_metrics()
    return {
        "reward": fmean(rewards),
        "groups_all_correct": shares["frac_all_correct"],
        "groups_all_wrong": shares["frac_all_wrong"],
    }


def length_metrics(batch: CollatedBatch, stats: reference.BatchStats) -> dict[str, float]:
    """Compute token counts and finish reasons."""
    rows = len(stats.completion_lens)
    return {
        "tokens": float(batch.attention_mask.sum()),
        "completion_tokens": fmean(stats.completion_lens),
        "truncated": (stats.finish_reasons.get("length", 0) + stats.finish_reasons.get("clamped", 0)) / rows,
        "padding": stats.padding_fraction,
    }
