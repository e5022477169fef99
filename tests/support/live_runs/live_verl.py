"""Trains by verl's trainer and workers with the hook that verl imports, with a planted bug or none."""

import json
import random
import sys
from dataclasses import replace

import torch
import verl.workers.engine.fsdp.transformer_impl as transformer_impl
from verl.trainer.ppo import core_algos
from verl.workers.engine.base import BaseEngine

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.adapters.verl.adapter import VerlAdapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.presets import GRPO
from rlcanary.live.hooks.verl import workers as hook
from rlcanary.tiny_models import tiny_llama

AUDITS = []
MADE = hook.audit_of


def audit_of(*arguments):
    AUDITS.append(MADE(*arguments))
    return AUDITS[-1]


def groups(seed):
    """Two groups of four completions of different lengths."""
    draw = random.Random(seed)
    return [
        Group(
            prompt_ids=[1, 5 + number],
            completions=[Completion([draw.randrange(3, 60) for _ in range(draw.randint(1, 7))]) for _ in range(4)],
            rewards=[float(place % 2) for place in range(3)] + [draw.random()],
        )
        for number in range(2)
    ]


def sampled(seed, off):
    """Sample two groups of four completions from the policy, whose engine reports so much less than their logprobs."""
    engine = ReferenceAdapter(GRPO).new_engine(tiny_llama())
    drawn = engine.generate([[1, 5], [1, 6]], {"n": 4, "max_new_tokens": 6, "seed": seed})
    return [
        replace(
            group,
            completions=[replace(each, logprobs=[value - off for value in each.logprobs]) for each in completions],
        )
        for group, completions in zip(groups(seed), drawn, strict=True)
    ]


def trained(updates=1, off=None):
    """Take updates of two micro-batches -> the weights, what was found, and the names of what is logged of it.

    `off` is what the engine's logprobs lack; None reports none.
    """
    AUDITS.clear()
    torch.manual_seed(0)
    adapter = VerlAdapter(
        {"ppo_mini_batch_size": 1024, "ppo_micro_batch_size_per_gpu": 4, "use_kl_loss": True, "entropy_coeff": 0.01}
    )
    state = adapter.new_state(tiny_llama().train(), tiny_llama(1), 1e-2)
    logged, named = set(), adapter._named
    adapter._named = lambda metrics: logged.update(metrics) or named(metrics)
    for seed in range(updates):
        adapter.rl_step(state, groups(seed) if off is None else sampled(seed, off), 0)
    found = sorted({str(finding) for audit in AUDITS for finding in audit.findings})
    told = {
        "found": found,
        "audited": sum(audit.audited + audit.rollouts for audit in AUDITS),
        "logged": sorted(name for name in logged if "canary" in name),
    }
    return state.model.state_dict(), told


def main():
    hook.audit_of = audit_of
    results = {}
    weights, results["none"] = trained(2)
    watched, BaseEngine.train_batch = BaseEngine.train_batch, BaseEngine.train_batch.__wrapped__
    others, results["without"] = trained(2)
    BaseEngine.train_batch = watched
    results["equal"] = all(torch.equal(weights[name], others[name]) for name in weights)

    results["samples"] = {
        "of the policy": trained(off=0.0)[1]["found"],
        "of other weights": trained(off=0.7)[1]["found"],
    }
    synchronous, hook.SYNCHRONOUS = hook.SYNCHRONOUS, "another"
    results["samples"]["of an asynchronous trainer"] = trained(off=0.7)[1]["found"]
    hook.SYNCHRONOUS = synchronous

    agg_loss = core_algos.agg_loss
    core_algos.agg_loss = lambda loss_mat, loss_mask, **options: agg_loss(loss_mat, loss_mask.roll(1, -1), **options)
    _, results["mask off by one"] = trained()
    core_algos.agg_loss = agg_loss

    engine = transformer_impl.FSDPEngineWithLMHead
    forward_step = engine.forward_step

    def halved(self, *arguments, **options):
        loss, output = forward_step(self, *arguments, **options)
        return loss / 2, output

    engine.forward_step = halved
    _, results["scaled by accumulation"] = trained()
    engine.forward_step = forward_step

    estimator = core_algos.compute_grpo_outcome_advantage

    def undivided(*arguments, norm_adv_by_std_in_grpo=True, **options):
        return estimator.__wrapped__(*arguments, norm_adv_by_std_in_grpo=False, **options)

    core_algos.compute_grpo_outcome_advantage = hook.watched_estimator(undivided, "grpo")
    _, results["not divided"] = trained()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
