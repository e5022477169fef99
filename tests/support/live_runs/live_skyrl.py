"""Trains by SkyRL's trainer and policy worker with its hook, with a planted bug or none, and writes what was found."""

import json
import random
import sys
from dataclasses import replace

import torch

from rlcanary.adapters.skyrl.adapter import SkyrlAdapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import completion_logprobs, make_batch
from rlcanary.tiny_models import tiny_llama

SkyrlAdapter()  # imports SkyRL without the packages that a CPU lacks

from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase  # noqa: E402
from skyrl.train import trainer as skyrl_trainer  # noqa: E402

PLAIN = PolicyWorkerBase._forward_backward_micro

from rlcanary.live.hooks.skyrl import workers as hook  # noqa: E402

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
            rewards=[1.0, 0.0, 1.0, draw.random()],
        )
        for number in range(2)
    ]


def scored(group, off):
    """Give completions the logprobs of the policy, and so much less."""
    batch, _ = make_batch([group], 0)
    logprobs = completion_logprobs(tiny_llama(), batch) - off
    completions = [
        replace(completion, logprobs=logprobs[row, : len(completion.token_ids)].tolist())
        for row, completion in enumerate(group.completions)
    ]
    return replace(group, completions=completions)


def noting(step, logged):
    """Note the names of the metrics of a training step."""

    def noted(*arguments):
        metrics = step(*arguments)
        logged.update(metrics)
        return metrics

    return noted


def trained(updates=1, off=None, **settings):
    """Take updates -> the weights, what was found, and the names of what is logged of it.

    `off` is what the engine's logprobs lack; None reports none.
    """
    AUDITS.clear()
    logged = set()
    torch.manual_seed(0)
    adapter = SkyrlAdapter({"use_kl_loss": True, "kl_loss_coef": 0.1, "use_entropy_loss": True} | settings)
    state = adapter.new_state(tiny_llama().train(), tiny_llama(1), 1e-2)
    step = skyrl_trainer.RayPPOTrainer._execute_training_step
    skyrl_trainer.RayPPOTrainer._execute_training_step = noting(step, logged)
    for seed in range(updates):
        sampled = groups(seed) if off is None else [scored(group, off) for group in groups(seed)]
        adapter.rl_step(state, sampled, 0)
    skyrl_trainer.RayPPOTrainer._execute_training_step = step
    found = sorted({str(finding) for audit in AUDITS for finding in audit.findings})
    told = {
        "found": found,
        "audited": sum(audit.audited + audit.rollouts for audit in AUDITS),
        "logged": sorted(logged),
    }
    return state.model.state_dict(), told


def main():
    hook.audit_of = audit_of
    results = {}
    weights, results["none"] = trained(2)
    watched, PolicyWorkerBase._forward_backward_micro = PolicyWorkerBase._forward_backward_micro, PLAIN
    others, results["without"] = trained(2)
    PolicyWorkerBase._forward_backward_micro = watched
    results["equal"] = all(torch.equal(weights[name], others[name]) for name in weights)

    results["samples"] = {
        "of the policy": trained(off=0.0)[1]["found"],
        "of other weights": trained(off=0.7)[1]["found"],
    }

    results["masks"] = [
        trained(off=0.3, **{f"off_policy_correction.{name}": value for name, value in masks.items()})[1]["found"]
        for masks in (
            {"token_mask_is_threshold_high": 1.1},
            {"outlier_token_is_threshold_low": 1.4},
            {"sequence_mask_metric": "geometric"},
        )
    ]

    reduce_loss = ppo_utils.reduce_loss
    ppo_utils.reduce_loss = lambda loss, loss_mask: reduce_loss(loss, loss_mask.roll(1, -1))
    _, results["mask off by one"] = trained()
    ppo_utils.reduce_loss = lambda loss, loss_mask: reduce_loss(loss, loss_mask) / 2
    _, results["scaled by accumulation"] = trained()
    ppo_utils.reduce_loss = reduce_loss

    divide = skyrl_trainer.apply_loss_reduction_to_advantages_minibatch

    def over_padding(**given):
        return divide(**{**given, "loss_mask": torch.ones_like(given["loss_mask"])})

    skyrl_trainer.apply_loss_reduction_to_advantages_minibatch = over_padding
    _, results["averaged over padding"] = trained()
    skyrl_trainer.apply_loss_reduction_to_advantages_minibatch = divide

    estimate = ppo_utils.compute_advantages_and_returns

    def undivided(**given):
        return estimate(**{**given, "grpo_norm_by_std": False})

    skyrl_trainer.ppo_utils.compute_advantages_and_returns = undivided
    _, results["not divided"] = trained()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
