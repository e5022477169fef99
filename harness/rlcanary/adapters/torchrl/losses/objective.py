"""torchrl's advantage transform and its LLM losses.

The loss is torchrl's own with its own distribution class behind it; only the actor's forward pass is replaced, by given
logprobs and entropies.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import kl_of_each_token, micro_batches
from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rlcanary.contract.batch import PolicyBatch

METRICS = {"kl_to_ref": "kl", "entropy": "entropy", "clip_fraction": "clip_fraction", "kl_approx": "approx_kl"}


class Objective(TorchrlBase):
    """Advantages, the filter of groups, the loss and its accumulation."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        _, counts = torch.unique(group_ids, return_counts=True)
        if len(counts.unique()) != 1:
            raise NotProvided("grpo_size is one size for all groups")
        written = self._written(rewards, group_ids, int(counts[0]))
        if written is None or len(written) != len(rewards):
            raise NotProvided("keep_return_bounds drops these groups")
        advantages = rewards.new_empty(len(rewards))
        advantages[written["row"]] = written["advantage"].flatten().to(rewards.dtype)
        return advantages

    def keep_group(self, rewards: Tensor) -> bool:
        import torch

        if self.advantage.get("keep_return_bounds") is None:
            raise NotProvided("keep_return_bounds is not set, without it every group is kept")
        if ((rewards != 0) & (rewards != 1)).any():
            raise NotProvided(
                "keep_return_bounds bounds the mean, which tells groups apart for rewards of 0 and 1 only"
            )
        return self._written(rewards, torch.zeros(len(rewards)), len(rewards)) is not None

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = self._loss_output(batch)
        return LossOutput(sum(_losses(output).values()).reshape(()), self._metrics(output, batch))  # type: ignore[union-attr]

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Run the trainer's optimization stepper; its backward passes end at leaves that collect each piece's weight."""
        import torch

        new_stepper = part("torchrl.trainers:MixedPrecisionOptimizationStepper")
        pieces = micro_batches(batch, n_micro)
        parameter = torch.nn.Parameter(torch.zeros(()))
        stepper = new_stepper(torch.optim.SGD([parameter]), gradient_accumulation_steps=n_micro)
        losses: list[Tensor] = []
        leaves: list[Tensor] = []

        def compute_loss(piece: PolicyBatch) -> Any:
            output = self._loss_output(piece)
            for name, loss in _losses(output).items():
                losses.append(loss)
                leaves.append(loss.detach().requires_grad_())
                output.set(name, leaves[-1])
            return output

        for piece in pieces:
            stepper.step(SimpleNamespace(compute_loss=compute_loss), piece)
        weighted = [(leaf.grad * loss).reshape(()) for leaf, loss in zip(leaves, losses, strict=True)]  # type: ignore[operator]
        return LossOutput(torch.stack(weighted).sum())

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Compute each token's KL as the loss's KL term over it alone with coefficient 1."""
        only_kl = _with_coefficient_one()
        return kl_of_each_token(lambda token: only_kl._loss_output(token).loss_kl_to_ref, logprobs, ref_logprobs)

    def _written(self, rewards: Tensor, group_ids: Tensor, size: int) -> Any:
        """Return the data that `MCAdvantage` writes to the replay buffer for one-step trajectories of groups, or None."""
        import torch
        from tensordict import NonTensorStack, TensorDict, lazy_stack
        from torchrl.objectives.llm import MCAdvantage

        rows = len(rewards)
        steps = TensorDict(
            {
                "group": NonTensorStack(*[NonTensorStack(str(group)) for group in group_ids.tolist()]),
                "row": torch.arange(rows).unsqueeze(1),
                "next": {
                    # The reward has the shape that torchrl's reward parsers give it: one for all tokens of a step.
                    "reward": rewards.clone().view(rows, 1, 1, 1),
                    "done": torch.ones(rows, 1, 1, dtype=torch.bool),
                },
            },
            batch_size=[rows, 1],
        )
        if size < 2 and self.advantage.get("trajectory_return") is not None:
            raise NotProvided("trajectory_return needs groups of at least two")
        with quiet():
            trajectories = lazy_stack([lazy_stack(list(row.unbind(0))) for row in steps.unbind(0)])
            return MCAdvantage(grpo_size=size, prompt_key="group", **self.advantage).inv(trajectories)

    def _loss_output(self, batch: PolicyBatch) -> Any:
        from tensordict import TensorDict

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("torchrl's loss has no global counts")
        loss = self._loss_module
        if loss.kl_to_ref_coeff and batch.ref_logprobs is None:
            raise NotProvided("kl_to_ref_coeff needs reference logprobs")
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        data: dict[str, Any] = {
            "tokens": {"full": batch.mask.long()},
            "log_probs": {"full": batch.old_logprobs},
            "advantage": advantages.unsqueeze(-1),
            "given": {"log_prob": batch.logprobs, "mask": batch.mask},
        }
        if batch.entropy is not None:
            data["given"]["entropy"] = batch.entropy
        if batch.ref_logprobs is not None:
            data["next"] = {"ref_log_probs": {"full": batch.ref_logprobs}}
        rows = TensorDict(data, batch_size=[len(batch.mask)])
        with quiet():
            return loss(_ragged(rows, batch.mask) if batch.advantages.ndim == 2 else rows)

    def _metrics(self, output: Any, batch: PolicyBatch) -> dict[str, float]:
        metrics = {ours: output.get(theirs) for theirs, ours in METRICS.items()}
        if batch.entropy is None:
            metrics["entropy"] = None
        return {name: float(value) for name, value in metrics.items() if value is not None}


def _losses(output: Any) -> dict[str, Tensor]:
    """Return the losses that the trainer adds up and sends backward."""
    return {name: value for name, value in output.items() if name.startswith("loss") and value is not None}


def _ragged(rows: TensorDict, mask_BT: Tensor) -> Any:
    """Cut each row behind its last trained token: advantages of tokens come ragged out of the replay buffer."""
    from tensordict import lazy_stack

    lengths = [max(1, int(row.nonzero().max()) + 1 if row.any() else 1) for row in mask_BT]
    return lazy_stack(
        [row.apply(lambda each, length=length: each[:length]) for row, length in zip(rows, lengths, strict=True)]
    )


@cache
def _with_coefficient_one() -> Objective:
    return Objective({"kl_to_ref_coeff": 1.0, "entropy_bonus": False})
