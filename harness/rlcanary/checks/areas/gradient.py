"""Gradients, tested without conventions: against the loss's own values, and against the enumerated policy gradient."""

import itertools
from dataclasses import replace

import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Finding, Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions

STEP = 1e-2


def _has_stopped_gradients(conventions: Conventions) -> str | None:
    return "CISPO stops gradients on purpose" if conventions.objective == "cispo" else None


def _kl_is_not_its_slope(conventions: Conventions) -> bool:
    """Tell whether the KL's declared gradient differs from the slope of its value: by a score term or a clamped weight."""
    is_weight_held = conventions.kl_ratio_weighted and conventions.kl_input_clamp is not None
    return conventions.kl_coef != 0 and (conventions.kl_score_term or is_weight_held)


@check("gradient.finite_differences", needs=("policy_loss",), applies=_has_stopped_gradients)
def finite_differences(subject: Subject, rng: Generator) -> None:
    """The gradient of the loss matches finite differences of its value.

    Silent because the optimizer sees only the gradient and the dashboard only the value: a detached factor, a value scaled
    after backward, or a weight that should not carry gradient leaves one of them right. Look for `detach()`, `.data`,
    `no_grad` and arithmetic on the loss after `backward()`.
    """
    if _kl_is_not_its_slope(subject.conventions):
        subject = subject.configured(kl_coef=0.0)
    for rows, width, lengths in ((1, 1, (1,)), (2, 2, (2, 1)), (4, 3, (3, 1, 2, 2))):
        batch = cases.policy_batch(rng, rows, width, lengths)
        # Ratios on both sides of 1; that of the first token, whose advantage is positive, is not clipped.
        drift_BT = (
            cases.uniform(rng, rows, width, low=0.05, high=0.7) * (torch.rand(rows, width, generator=rng) - 0.5).sign()
        )
        drift_BT[0, 0] = -drift_BT[0, 0].abs()
        batch = replace(batch, old_logprobs=(batch.logprobs.detach() - drift_BT).round(decimals=2))
        with subject.case(batch):
            call = subject.call("policy_loss", batch)
            gradient_BT = call.gradient("logprobs")
            for row, position in batch.mask.nonzero().tolist():
                before, after = (_shifted(subject, batch, row, position, step) for step in (-STEP, STEP))
                left, right = (float(call.value) - before) / STEP, (after - float(call.value)) / STEP
                slope, bend = (left + right) / 2, abs(right - left) / 2
                if bend > 0.05 * max(abs(left), abs(right), 0.05):
                    continue  # A clipping bound or a clamp lies within the step, where the slope is not unique.
                got = float(gradient_BT[row, position])
                subject.compared()
                if abs(got - slope) > bend + 0.02 * max(abs(slope), abs(got), 0.05):
                    raise Finding(
                        f"at row {row}, position {position} the gradient is {got:.4g}, the slope of the loss {slope:.4g}",
                        call.snippet(_slope_lines(row, position)),
                        f"slope at row {row}, position {position}",
                        abs(got - slope) / (abs(slope) or 1.0),
                    )


def _shifted(subject: Subject, batch: PolicyBatch, row: int, position: int, step: float) -> float:
    logprobs_BT = batch.logprobs.detach().clone()
    logprobs_BT[row, position] += step
    return float(subject.call("policy_loss", replace(batch, logprobs=logprobs_BT.requires_grad_())).value)


def _slope_lines(row: int, position: int) -> list[str]:
    return [
        "import dataclasses",
        "def loss_at(step):",
        "    moved = arguments[0].logprobs.detach().clone()",
        f"    moved[{row}, {position}] += step",
        "    moved.requires_grad_()",
        "    return float(adapter.policy_loss(dataclasses.replace(arguments[0], logprobs=moved)).loss.detach())",
        f"left, right = (loss_at(0) - loss_at(-{STEP})) / {STEP}, (loss_at({STEP}) - loss_at(0)) / {STEP}",
        "slope, bend = (left + right) / 2, abs(right - left) / 2",
        "(gradient,) = torch.autograd.grad(adapter.policy_loss(arguments[0]).loss, arguments[0].logprobs)",
        f"got = float(gradient[{row}, {position}])",
        "assert abs(got - slope) <= bend + 0.02 * max(abs(slope), abs(got), 0.05), (got, slope)",
    ]


@check("gradient.is_the_policy_gradient", needs=("token_logprobs", "policy_loss"))
def is_the_policy_gradient(subject: Subject, rng: Generator) -> None:
    """Summed over all completions of a tiny policy, weighted by probability, the gradient points along ∇ E[reward].

    Silent because a wrong direction still moves the policy: with unevenly weighted tokens, advantages of other
    completions or probabilities at another temperature, the reward may rise for a while by luck. Look at everything
    between the logits and the loss; each part alone may be right.
    """
    if subject.conventions.kl_coef or subject.conventions.entropy_coef:
        subject = subject.configured(kl_coef=0.0, entropy_coef=0.0)
    vocabulary, width = 3, 2
    logits_TV = cases.uniform(rng, width, vocabulary, low=-1, high=1)
    sequences_BT = torch.tensor(list(itertools.product(range(vocabulary), repeat=width)))
    rewards_B = cases.uniform(rng, len(sequences_BT), low=-1, high=1)
    exact_TV = logits_TV.double().requires_grad_()
    logprobs_BT = _gathered(exact_TV, sequences_BT)
    probabilities_B = logprobs_BT.sum(dim=1).exp()
    (wanted_TV,) = torch.autograd.grad((probabilities_B * rewards_B).sum(), exact_TV)

    leaf_TV = logits_TV.clone().requires_grad_()
    scored = subject.adapter.token_logprobs(
        leaf_TV.expand(len(sequences_BT), width, vocabulary).contiguous(), sequences_BT, 1.0
    )
    batch = PolicyBatch(
        logprobs=scored.detach().float().requires_grad_(),
        old_logprobs=scored.detach().float(),
        advantages=(rewards_B * probabilities_B.detach()).float() * 10,
        mask=torch.ones_like(sequences_BT, dtype=torch.bool),
        ref_logprobs=scored.detach().float(),
        sampler_logprobs=scored.detach().float(),
        entropy=torch.zeros(sequences_BT.shape),
        group_ids=torch.zeros(len(sequences_BT), dtype=torch.long),
    )
    call = subject.call("policy_loss", batch)
    (got_TV,) = torch.autograd.grad(scored, leaf_TV, call.gradient("logprobs").to(scored.dtype))
    cosine = _cosine(-got_TV, wanted_TV)
    subject.compared()
    if cosine < 0.999:
        lines = [
            f"logits = {literal(logits_TV)}.requires_grad_()",
            f"ids = {literal(sequences_BT)}",
            "scored = adapter.token_logprobs(logits.expand(len(ids), *logits.shape).contiguous(), ids, 1.0)",
            "(upstream,) = torch.autograd.grad(adapter.policy_loss(arguments[0]).loss, arguments[0].logprobs)",
            "(got,) = torch.autograd.grad(scored, logits, upstream)",
            f"wanted = {literal(wanted_TV.float())}",
            "cosine = torch.nn.functional.cosine_similarity(-got.flatten(), wanted.flatten(), dim=0)",
            "assert cosine > 0.999, cosine",
        ]
        raise Finding(
            f"the descent direction has cosine {cosine:.4f} with the policy gradient",
            call.snippet(lines),
            "direction",
            1 - cosine,
        )


def _gathered(logits_TV: Tensor, ids_BT: Tensor) -> Tensor:
    scores_BTV = logits_TV.log_softmax(dim=-1).expand(len(ids_BT), *logits_TV.shape)
    return scores_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def _cosine(left: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.double().flatten(), right.double().flatten(), dim=0))
