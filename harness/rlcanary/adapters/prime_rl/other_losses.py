"""prime-rl's other components of a loss, the cross entropy and the divergence from a reference, and its pass@k."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part
from rlcanary.adapters.prime_rl import earlier
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rlcanary.contract.records.other_losses import SupervisedBatch
    from rlcanary.contract.records.reporting import EvaluatedItem


class OtherLosses(Adapter):
    """Losses besides the policy's, and the metrics of an evaluation."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        """Compute the component of cross entropy, whose weights are the mask."""
        import torch

        earlier.require_components()
        from prime_rl.trainer.rl.loss import selective_log_softmax, shift_tensor_left, shift_tensor_right

        if batch.global_sequences is not None and batch.global_tokens is None:
            raise NotProvided("the trainer counts tokens")
        mask = batch.mask.clone()
        mask[:, 0] = False
        known_ids = batch.token_ids.masked_fill(~mask, 0)
        with torch.compiler.set_stance("force_eager"):
            logprobs = selective_log_softmax(batch.logits, shift_tensor_left(known_ids))
        count = int(mask.sum()) if batch.global_tokens is None else int(batch.global_tokens)
        loss = component(shift_tensor_right(logprobs), mask, ce_weights=list(mask.float()), ce_scale=max(count, 1))
        return LossOutput(loss)

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Read what a logprob is pushed by, on policy, off the component of the divergence from a reference."""
        import torch

        earlier.require_components()
        logprobs = student_logprobs.detach().clone().requires_grad_()
        weights = {"ref_logprobs": list(teacher_logprobs), "ref_kl_weights": list(mask.float())}
        (gradient,) = torch.autograd.grad(component(logprobs, mask, **weights), logprobs)
        return -gradient

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        pass_at_k = part("prime_rl.orchestrator.metrics:pass_at_k")
        make_stat = part("prime_rl.orchestrator.metrics:Stat")

        def over(some: Sequence[EvaluatedItem]) -> dict[str, float]:
            records: list[Any] = [
                SimpleNamespace(
                    trace=SimpleNamespace(reward=score),
                    episode=SimpleNamespace(group=SimpleNamespace(id=each.item_id)),
                )
                for each in some
                for score in each.scores
            ]
            passed = pass_at_k(records)
            if f"pass@{k}" not in passed:
                raise NotProvided("pass@k is of scores of 0 and 1, for powers of 2 up to the number of samples")
            stat = make_stat([record.trace.reward for record in records])
            return {"mean@n": stat.mean(), "pass@k": passed[f"pass@{k}"]}

        if len({len(each.scores) for each in items}) > 1:
            raise NotProvided("items have one number of samples")
        if any(score != score for each in items for score in each.scores):
            raise NotProvided("a sample without a score is left out before")
        datasets = dict.fromkeys(each.dataset for each in items)
        named = {name: over([each for each in items if each.dataset == name]) for name in datasets}
        return {f"{name}/{key}": value for name, found in named.items() for key, value in found.items()}


def component(logprobs: Tensor, mask: Tensor, **weights: Any) -> Any:
    """Compute a loss of which one component alone has weights."""
    import torch
    from prime_rl.trainer.rl.loss import compute_loss

    nothing = {"rl_weights": list(torch.zeros_like(logprobs)), "ce_weights": None, "ref_kl_weights": None}
    scales = {"rl_scale": 1, "ce_scale": 1, "ref_kl_scale": 1}
    given = {"ref_logprobs": None, **nothing, **scales, **weights}
    loss, _ = compute_loss(
        trainer_logprobs=list(logprobs),
        inference_logprobs=list(logprobs.detach()),
        advantages=list(torch.zeros_like(logprobs)),
        loss_mask=list(mask),
        rl_loss_fn=None,
        **given,
    )
    return loss
