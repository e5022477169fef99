"""An RL step seen from its optimizer: the gradient and the weights of each update, and the completions that it trained."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_true
from rlcanary.checks.worlds.training.descent import watched
from rlcanary.checks.worlds.training.states import decaying, named, precision, seeded, unwrapped
from rlcanary.checks.worlds.training.tiny_trainer import reference_near, sampled, state_of
from rlcanary.checks.worlds.training.updates import before_steps
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.layers import copied

PAD = 0
# Too small to move a float32 weight: every update starts from the same policy.
STILL = 1e-12


def rollout_groups() -> list[Group]:
    """Make two groups, anew in each call, so that no code under test changes those of the next.

    Both have two completions, so that mini-batches of whole groups have as many rows; no reward is its group's mean.
    """
    return [
        Group([5, 6, 7], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0], item_id="a"),
        Group([12, 13], [Completion([14, 15, 16, 2]), Completion([17, 18])], [0.0, 0.5], item_id="b"),
    ]


@dataclass(frozen=True)
class Observed:
    """One optimizer update of an RL step.

    Attributes:
        gradients: by parameter, as the optimizer was given them.
        learning_rates: by parameter group.
        model: the policy as it was before.
    """

    gradients: dict[str, Tensor]
    learning_rates: tuple[float, ...]
    model: Any


class RlStep:
    """A state, and the updates that RL steps make on it.

    Attributes:
        state: the adapter's own.
        updates: of the latest step.
        metrics: logged by the latest step.
    """

    def __init__(self, adapter: Adapter, model: Any, learning_rate: float, decays: bool = False) -> None:
        """Make a state from the model, with a falling learning rate instead of its own if it `decays`."""
        policy, ref_model = copied((model, reference_near(model, adapter.conventions)))
        state = state_of(adapter, policy, ref_model, learning_rate)
        self.state = decaying(state) if decays else state
        self.updates: list[Observed] = []
        self.metrics: dict[str, float] = {}
        self._models: list[Any] = []
        self._watch = watched(self.state)
        before_steps(self.state.optimizer, self._keep)

    def take(self, adapter: Adapter, groups: Sequence[Group]) -> "Frozen":
        """Take a step on these groups -> the inputs that its updates share, by the oracle.

        Raises:
            Finding: the optimizer was stepped another number of times than declared.
        """
        conventions = adapter.conventions
        frozen = Frozen.of(self.state, groups, conventions)
        first, self._models = len(self._watch.updates), []
        logged = seeded(adapter.rl_step, self.state, copy.deepcopy(list(groups)), PAD)
        self.metrics = {name: float(value) for name, value in logged.items()}
        pairs = zip(self._watch.updates[first:], self._models, strict=True)
        self.updates = [Observed(update.gradients, update.learning_rates, model) for update, model in pairs]
        expected = conventions.epochs_per_rollout * conventions.mini_batches
        told = (
            f"an RL step of {plan(conventions)} stepped the optimizer {len(self.updates)} times instead of {expected}"
        )
        assert_true(len(self.updates) == expected, told, quantity="number of updates", magnitude=1.0)
        return frozen

    def astray(self) -> list[str]:
        """Return the parameters that are not where the optimizer takes them with the gradients of all steps."""
        return self._watch.astray()

    def _keep(self) -> None:
        self._models.append(copied(unwrapped(self.state.model)))


def with_logprobs(model: Any, conventions: Conventions, groups: Sequence[Group], drift: float = 0.0) -> list[Group]:
    """Give the completions the logprobs of this policy, off by up to `drift` nats."""
    scored = sampled(model, conventions, groups, drift).old_logprobs
    rows = iter(() if scored is None else scored)
    return [
        replace(
            group,
            completions=[
                replace(each, logprobs=next(rows)[: len(each.token_ids)].tolist()) for each in group.completions
            ],
        )
        for group in groups
    ]


@dataclass(frozen=True)
class Frozen:
    """The inputs that all updates on a rollout share, in float64.

    Attributes:
        batch: the rollout, collated.
        given: advantages, old and reference logprobs of its rows.
        conventions: the declared ones, without dropout.
        rounding: the relative error of gradients in the precision that the state computes in.
    """

    batch: CollatedBatch
    given: PolicyBatch
    conventions: Conventions
    rounding: float

    @classmethod
    def of(cls, state: Any, groups: Sequence[Group], conventions: Conventions) -> "Frozen":
        """Compute it from a state before its first update."""
        conventions = conventions.replace(training_dropout=False)
        batch, _ = reference.make_batch(list(groups), PAD, mask_truncated=conventions.mask_truncated)
        ref_model = None if state.ref_model is None else _exact(state.ref_model)
        given = reference.frozen_batch(_exact(state.model), ref_model, batch, conventions)
        return cls(batch, given, conventions, max(1e-3, 8 * torch.finfo(precision(state.model)).eps))

    def gradients(self, model: Any, rows: Sequence[int]) -> dict[str, Tensor]:
        """Compute the declared gradient of an update of this policy on these rows, before it is clipped."""
        (found,) = self._gradients(model, [rows])
        return found

    def metrics(self, model: Any, rows: Sequence[int]) -> dict[str, float]:
        """Compute the declared metrics of an update of this policy on these rows, the loss and the gradient's norm too."""
        given = reference.mini_batch(_exact(model), self.batch, self.given, torch.tensor(rows), self.conventions)
        output = reference.policy_loss(given, self.conventions)
        norm = float(_flat(self.gradients(model, rows)).norm())
        return {**output.metrics, "loss": float(output.loss.detach()), "grad_norm": norm}

    def clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scale gradients down to the declared norm."""
        limit, norm = self.conventions.max_grad_norm, float(_flat(gradients).norm())
        factor = 1.0 if limit is None or norm <= limit else limit / norm
        return {name: gradient * factor for name, gradient in gradients.items()}

    def rows_in(self, update: Observed) -> list[int] | None:
        """Find the rows whose gradients add up to that of an update.

        Returns:
            Their indices; none where it cannot be told, since a row has no gradient or an update's is no sum of those of its
            rows; None if no such sum is the update's.
        """
        if not self.adds_up:
            return []
        every = self._gradients(update.model, [[row] for row in range(len(self.batch.rewards))])
        rows_RP = torch.stack([_flat(gradients) for gradients in every])
        norms_R, sum_P = rows_RP.norm(dim=1), _flat(update.gradients)
        # Of a row with less, the rounding of the others may be as large.
        if not bool((norms_R > 1e-3 * norms_R.max()).all()):
            return []
        weights_R = torch.linalg.lstsq(rows_RP.T, sum_P[:, None]).solution[:, 0]
        rest = float((weights_R @ rows_RP - sum_P).norm() / sum_P.norm())
        if not rest <= self.rounding:
            return None
        return [int(row) for row in (weights_R.abs() > 0.05 * weights_R.abs().max()).nonzero()]

    @property
    def adds_up(self) -> bool:
        """Whether the gradient of an update is a sum of those of its rows, each with one weight for all its terms."""
        now = self.conventions
        kl = now.kl_aggregation if now.kl_coef and now.kl_placement == "loss" else None
        entropy = now.entropy_aggregation if now.entropy_coef else None
        others = {each for each in (kl, entropy) if each is not None} - {now.aggregation}
        return now.top_entropy is None and not others

    def _gradients(self, model: Any, choices: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """Compute the declared gradients of updates on several choices of rows, of one forward pass over them all."""
        exact, every_R = _exact(model), torch.arange(len(self.batch.rewards))
        whole = reference.mini_batch(exact, self.batch, self.given, every_R, self.conventions)
        parameters = {name: each for name, each in named(exact).items() if each.requires_grad}
        gradients = []
        for rows in choices:
            loss = reference.policy_loss(whole.rows(torch.tensor(rows)), self.conventions).loss
            found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
            gradients.append(dict(zip(parameters, found, strict=True)))
        return gradients


def plan(conventions: Conventions) -> str:
    """Describe the declared updates of an RL step."""
    epochs, pieces = conventions.epochs_per_rollout, conventions.mini_batches
    return f"{epochs} epoch{'s' * (epochs > 1)} of {pieces} mini-batch{'es' * (pieces > 1)}"


def passes(updates: Sequence[Any], conventions: Conventions) -> list[Sequence[Any]]:
    """Group what belongs to the updates of a step by its epochs."""
    size = conventions.mini_batches
    return [updates[start : start + size] for start in range(0, len(updates), size)]


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.double().flatten().cpu() for gradient in gradients.values()])


def _exact(model: Any) -> Any:
    return copied(unwrapped(model)).double().cpu()
