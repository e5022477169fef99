"""The policy loss: declared value, declared gradient, and independence of irrelevant inputs."""

import math
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Call, Derived, Finding, Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.checks.worlds.oracle import exact_loss, exact_output
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Aggregation, Conventions


@check("loss.declared_value", needs=("policy_loss",))
def declared_value(subject: Subject, rng: Generator) -> None:
    """The loss is the declared objective: ratio, clipping, correction, aggregation, KL and entropy terms.

    Silent because any of these can be off by a factor or on the wrong side and still give a finite, falling number. Look
    at the sign of the surrogate, the side of each clipping bound, and what the sum over tokens is divided by.
    """
    for batch in cases.policy_batches(rng, empty_row=True):
        with subject.case(batch):
            loss, _ = exact_loss(batch, subject.conventions)
            call = subject.call("policy_loss", batch)
            _weigh_aggregations(call, batch)
            call.expect(loss, f"the loss is not the declared one ({_terms(subject)})")


@check("loss.declared_gradient", needs=("policy_loss",))
def declared_gradient(subject: Subject, rng: Generator) -> None:
    """The gradient with respect to every token's logprob is that of the declared objective.

    Silent because the logged loss can be exactly right while the gradient is not: a missing or a misplaced detach, a
    division after backward, a weight that carries gradient. Look at `detach()` on old logprobs and importance weights.
    """
    for batch in cases.policy_batches(rng, empty_row=True):
        with subject.case(batch):
            _, gradient_BT = exact_loss(batch, subject.conventions)
            call = subject.call("policy_loss", batch)
            _weigh_aggregations(call, batch)
            call.expect_gradient(
                gradient_BT, f"the gradient is not that of the declared loss ({_terms(subject)})", "logprobs"
            )


def _weigh_aggregations(call: Call, batch: PolicyBatch) -> None:
    """Find out which other aggregations give this loss, in value and in gradient."""
    declared = call.subject.conventions.aggregation
    others = [{"aggregation": name} for name in get_args(Aggregation) if name != declared]
    call.subject.weigh(others, lambda conventions: call.gives(*exact_loss(batch, conventions)))


def _terms(subject: Subject) -> str:
    conventions = subject.conventions
    terms = [conventions.objective, f"{conventions.ratio_level} ratio", conventions.aggregation]
    terms += [f"kl_coef {conventions.kl_coef:g}"] if conventions.kl_coef else []
    terms += [f"entropy_coef {conventions.entropy_coef:g}"] if conventions.entropy_coef else []
    return ", ".join(terms)


@check("loss.on_policy_sign", needs=("policy_loss",))
def on_policy_sign(subject: Subject, rng: Generator) -> None:
    """On policy, a gradient step raises the logprob of every token with positive advantage and lowers the others.

    Silent because the policy still moves, and the reward may still drift up, with advantages that are squared, used as
    a mask or stripped of their sign. Look at every place where the advantage enters, and how often.
    """
    if subject.conventions.kl_coef != 0:
        subject = subject.configured(kl_coef=0.0)
    for batch in cases.policy_batches(rng, on_policy=True):
        with subject.case(batch):
            call = subject.call("policy_loss", batch)
            gradient_BT = call.gradient("logprobs")
            wanted_BT = -batch.advantages.sign().unsqueeze(1).expand_as(gradient_BT)
            wrong_BT = (gradient_BT.sign() != wanted_BT) & batch.mask
            subject.compared(int(batch.mask.sum()))
            if wrong_BT.any():
                row, position = wrong_BT.nonzero()[0].tolist()
                raise Finding(
                    f"on policy, the token at row {row}, position {position} has advantage "
                    f"{float(batch.advantages[row]):.3g} and gradient {float(gradient_BT[row, position]):.3g}",
                    call.snippet(
                        [
                            "output = adapter.policy_loss(*arguments).loss",
                            "(got,) = torch.autograd.grad(output, arguments[0].logprobs)",
                            f"assert got[{row}, {position}].sign() == {float(wanted_BT[row, position])}, got",
                        ]
                    ),
                    "sign of the gradient",
                    float(wrong_BT.sum() / batch.mask.sum()),
                )


def _couples_rows(conventions: Conventions) -> str | None:
    return "the entropy bonus is on" if conventions.entropy_coef else None


@check("loss.rows_are_separate", needs=("policy_loss",), applies=_couples_rows)
def rows_are_separate(subject: Subject, rng: Generator) -> None:
    """Changing one completion's advantage changes the gradient of that completion only.

    Silent because a broadcast of [B, 1] against the wrong axis gives every completion the sum of all advantages, which is
    about zero for centred ones: the policy stands still and nothing fails. Look for `unsqueeze` on advantages that already
    have a token axis, and test with as many rows as positions.
    """
    for rows, width, lengths in ((2, 2, (2, 2)), (3, 4, (4, 2, 3))):
        with subject.case(rows, width):
            batch = cases.policy_batch(rng, rows, width, lengths)
            before = subject.call("policy_loss", batch)
            raised_B = batch.advantages.clone()
            raised_B[0] += 2.0
            call = subject.call("policy_loss", replace(batch, advantages=raised_B))
            others_BT = (torch.arange(rows) > 0).unsqueeze(1).expand(rows, width)
            call.expect_gradient(
                before.gradient("logprobs"),
                "raising the advantage of the first row by 2 changed the gradient of the others",
                "logprobs",
                where=others_BT,
                derived=Derived(before),
            )


@check("loss.token_advantages", needs=("policy_loss",))
def token_advantages(subject: Subject, rng: Generator) -> None:
    """Advantages given per token, equal along each row, give the same loss and gradient as one advantage per row.

    Silent because [B, T] and [B, 1] broadcast together to [B, B, T] without an error. Look at `unsqueeze(1)` and at how
    the shape of the advantages is told apart.
    """
    for rows, width, lengths in ((2, 2, (2, 1)), (3, 3, (3, 1, 2)), (2, 4, (4, 2))):
        batch = cases.policy_batch(rng, rows, width, lengths)
        per_token = replace(batch, advantages=batch.advantages.unsqueeze(1).expand(rows, width).contiguous())
        with subject.case(batch):
            before = subject.call("policy_loss", batch)
            call = subject.call("policy_loss", per_token)
            derived = Derived(before)
            told = "advantages of shape [B, T], equal along rows, change the"
            call.expect(before.value, f"{told} loss", derived=derived)
            call.expect_gradient(before.gradient("logprobs"), f"{told} gradient", "logprobs", derived=derived)


@check("loss.row_order", needs=("policy_loss",))
def row_order(subject: Subject, rng: Generator) -> None:
    """Shuffling the rows of the batch changes neither the loss, nor any token's gradient, nor a logged mean.

    Silent because data loaders shuffle anyway: the loss is then that of mismatched completions and advantages. Look for
    a tensor that is indexed, filtered or sorted while its neighbours are not.
    """
    batch = cases.policy_batch(rng, 4, 5, (5, 2, 1, 3))
    order = torch.tensor([2, 0, 3, 1])
    before = subject.call("policy_loss", batch)
    shuffled = _leaf(batch.rows(order))
    call = subject.call("policy_loss", shuffled)
    _expect_same(call, before, "shuffling the rows", f"{{}}[{literal(order)}]")


@check("loss.padding_amount", needs=("policy_loss",))
def padding_amount(subject: Subject, rng: Generator) -> None:
    """Padding the batch to a greater width changes neither the loss, nor any gradient, nor a logged mean.

    Silent because the width of a batch is that of its longest completion: a mean over all positions makes the learning
    rate, or the KL coefficient, depend on the longest of the neighbours. Look for `.mean()` without the mask.
    """
    batch = cases.policy_batch(rng, 3, 3, (3, 1, 2))
    before = subject.call("policy_loss", batch)
    call = subject.call("policy_loss", _widened(batch, 4))
    _expect_same(call, before, "four more columns of padding", "torch.nn.functional.pad({}, (0, 4))")


@check("loss.masked_positions", needs=("policy_loss",))
def masked_positions(subject: Subject, rng: Generator) -> None:
    """Values at masked positions, NaN and infinities included, change no loss, no gradient and no logged mean.

    Silent because a mask by multiplication turns NaN × 0 into NaN for the whole batch, which a gradient-norm guard then
    skips: updates are dropped without a message. `torch.where` behind the arithmetic saves the loss and not the
        gradient: NaN
    comes back through the branch that was not taken, at the masked positions themselves, and from there reaches every
    weight. Padding is where garbage lives. Look for `x * mask` and for `where` around the result; `torch.where` or
    `masked_fill` before the arithmetic is immune.
    """
    batch = cases.policy_batch(rng, 2, 3, (3, 1))
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy"):
        with subject.case(name):
            option = _reading(subject, name)
            before = option.call("policy_loss", batch)
            for garbage in (-50.0, math.nan, math.inf, -math.inf):
                with subject.case(garbage):
                    values_BT = getattr(batch, name).detach().masked_fill(~batch.mask, garbage)
                    call = option.call_unless_raised("policy_loss", _leaf(replace(batch, **{name: values_BT})))
                    if call is not None:
                        _expect_same(call, before, f"{garbage} at the masked positions of {name}")


def _reading(subject: Subject, name: str) -> Subject:
    """Return the implementation with the term enabled that reads this field of the batch."""
    conventions = subject.conventions
    match name:
        case "ref_logprobs" if conventions.kl_coef == 0 or conventions.kl_placement == "reward":
            return subject.configured(kl_coef=0.5, kl_placement="loss")
        case "sampler_logprobs" if conventions.importance_level == "none":
            return subject.configured(importance_level="token", importance_high=1.2)
        case "entropy" if conventions.entropy_coef == 0:
            return subject.configured(entropy_coef=0.1)
    return subject


@check("loss.clipping", needs=("policy_loss",))
def clipping(subject: Subject, rng: Generator) -> None:
    """A token is clipped on the declared side and at the declared bound: above for A > 0, below for A < 0.

    Silent because a clipped and an unclipped token have nearly the same loss: only their gradients and the clip
    fraction differ. Look at min and max, at the sign of the advantage, at which of the two epsilons goes where, and at
    a clip fraction that counts another side than the one that is clipped.
    """
    conventions = subject.conventions
    bounds = [1 - conventions.clip_low] if conventions.clip_low is not None else []
    bounds += [1 + conventions.clip_high] if conventions.clip_high is not None else []
    bounds += [conventions.dual_clip] if conventions.dual_clip is not None else []
    # Both sides of every bound, and never on one, where two gradients are correct.
    ratios = {1.0, 0.31, 2.9, *(bound * side for bound in bounds for side in (0.97, 1.03))}
    for ratio in sorted(value for value in ratios if all(abs(value - bound) > 1e-4 for bound in bounds)):
        for advantage in (1.0, -1.0):
            told = f"ratio {ratio:.3g}"
            with subject.case(told, f"advantage {advantage:g}"):
                call = _expect_one_token(subject, math.log(ratio), advantage, told)
                expected = exact_output(call.arguments[0], subject.conventions).metrics
                _expect_metrics(call, expected, f"for one token with {told} and advantage {advantage:g}")


@check("loss.log_ratio_clamp", needs=("policy_loss",))
def log_ratio_clamp(subject: Subject, rng: Generator) -> None:
    """The log-ratio is clamped as declared, on both sides, and a token beyond the clamp has no gradient.

    Silent because ratios of this size are rare: one token whose probability fell by e²⁰ then outweighs its batch, or
    overflows to infinity, and infinity times a gradient of zero is NaN. Look for `exp` before the clamp, for a clamp of
    the ratio where one of the log-ratio is declared, and for a clamp that the conventions do not mention.
    """
    for choice in ({}, {"log_ratio_clamp": 0.5}, {"log_ratio_clamp": 0.5, "clip_low": None, "clip_high": None}):
        with subject.case(choice):
            option = subject.configured(**choice)
            clamp = option.conventions.log_ratio_clamp
            # Without a clamp a ratio of e⁵ is an ordinary number; behind one even a ratio that overflows float32 is.
            sizes = (5.0,) if clamp is None else (0.97 * clamp, 1.03 * clamp, clamp + 100)
            for log_ratio in (sign * size for size in sizes for sign in (1, -1)):
                for advantage in (1.0, -1.0):
                    told = f"log-ratio {log_ratio:.3g}"
                    with subject.case(told, f"advantage {advantage:g}"):
                        _expect_one_token(option, log_ratio, advantage, told)


def _expect_one_token(subject: Subject, log_ratio: float, advantage: float, told: str) -> Call:
    """Compare the loss of a one-token batch, with equal policy and reference logprobs, with the declared loss."""
    logprobs_11 = torch.tensor([[-1.0]])
    batch = PolicyBatch(
        logprobs=logprobs_11.clone().requires_grad_(),
        old_logprobs=logprobs_11 - log_ratio,
        advantages=torch.tensor([advantage]),
        mask=torch.tensor([[True]]),
        ref_logprobs=logprobs_11,
        sampler_logprobs=logprobs_11 - log_ratio,
        entropy=torch.tensor([[1.0]]),
        group_ids=torch.tensor([0]),
    )
    loss, gradient_11 = exact_loss(batch, subject.conventions)
    call = subject.call("policy_loss", batch)
    case = f"one token with {told} and advantage {advantage:g}"
    call.expect(loss, f"{case}: wrong loss")
    call.expect_gradient(gradient_11, f"{case}: wrong gradient", "logprobs")
    return call


@check("loss.metrics", needs=("policy_loss",))
def metrics(subject: Subject, rng: Generator) -> None:
    """Logged KL, entropy, clip fraction and ratios are those of the trained tokens, as recomputed from the batch.

    Silent because metrics affect only people's decisions. Look for means over padding, means of means, and a clip
    fraction that counts tokens which are not clipped.
    """
    for batch in cases.policy_batches(rng):
        with subject.case(batch):
            call = subject.call("policy_loss", batch)
            _expect_metrics(call, exact_output(batch, subject.conventions).metrics, "recomputed from the batch")


def _expect_metrics(call: Call, expected: dict[str, float], told: str) -> None:
    for name in sorted(set(expected) & set(call.output.metrics)):
        call.expect_metric(name, expected[name], told)


@check("loss.inputs_untouched", needs=("policy_loss",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """Computing the loss does not modify the batch.

    Silent because the second epoch or the next micro-batch then sees other numbers than the first. Look for operations
    in place on advantages, masks and logprobs.
    """
    call = subject.call("policy_loss", cases.policy_batch(rng, 2, 3, (3, 1)))
    call.expect_inputs_untouched("policy_loss changed its batch in place")


@check("loss.nothing_trained", needs=("policy_loss",))
def nothing_trained(subject: Subject, rng: Generator) -> None:
    """A batch in which every token is masked has loss zero and gradient zero.

    Silent because it happens once in a thousand steps, after filtering: 0 / 0 gives NaN, which the optimizer writes into
    every weight or a guard skips together with the rest of the update. Look at the clamp of the token count.
    """
    batch = cases.policy_batch(rng, 2, 3, (0, 0))
    call = subject.call("policy_loss", batch)
    call.expect(torch.tensor(0.0), "the loss of a batch without a trained token is not zero")
    call.expect_gradient(torch.zeros(2, 3), "the gradient of a batch without a trained token is not zero", "logprobs")


def _leaf(batch: PolicyBatch) -> PolicyBatch:
    return replace(batch, logprobs=batch.logprobs.detach().clone().requires_grad_())


def _expect_same(call: Call, before: Call, told: str, form: str = "{}") -> None:
    """Demand the loss, the gradient and the logged metrics of an earlier call.

    Args:
        call: the call under test.
        before: the call that it has to agree with.
        told: the change to the batch between the two.
        form: Python with {} in place of the earlier call's gradient, for a batch of another layout.
    """
    gradient_BT = eval(form.format("gradient"), {"torch": torch, "gradient": before.gradient("logprobs")})
    call.expect(before.value, f"{told} changed the loss", derived=Derived(before))
    call.expect_gradient(gradient_BT, f"{told} changed the gradient", "logprobs", derived=Derived(before, form))
    for name in sorted(set(before.output.metrics) & set(call.output.metrics)):
        call.expect_metric(name, before.output.metrics[name], f"without {told}", before)


def _widened(batch: PolicyBatch, columns: int) -> PolicyBatch:
    def wider(values_BT: Tensor | None) -> Tensor | None:
        if values_BT is None:
            return None
        return torch.nn.functional.pad(values_BT.detach(), (0, columns))

    names = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy", "mask")
    widened: dict[str, Any] = {name: wider(getattr(batch, name)) for name in names}
    return _leaf(replace(batch, **widened))
