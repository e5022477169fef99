"""prime-rl's training step, and the logprobs that it computes on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import part
from rlcanary.adapters.prime_rl.rows import rows_of
from rlcanary.adapters.prime_rl.run import Step
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.state import TrainState

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group

LOGGED = {
    "loss/mean": "loss",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "approx_kl",  # r - 1 - log r
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
}
# Without bounds.
OFF = {"dppo_mask_low": float("inf"), "dppo_mask_high": float("inf"), "kl_tau": 0.0}


class Training(Adapter):
    """Scores and updates of a model."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """Score the rows as a step does that changes nothing, packed into micro-batches without padding."""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        state = TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
        step = Step(state, rows_of(batch, temperature, torch.zeros(len(batch.rewards))), self._config())
        scored_BT = torch.full(batch.completion_ids.shape, torch.nan)
        rows = zip(step.logprobs, prompts_of(batch), tokens_of_completions(batch), strict=True)
        for row, (logprobs, prompt, kept) in enumerate(rows):
            scored_BT[row, kept] = logprobs[len(prompt) :]
        return scored_BT

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self.completion_logprobs(model, batch, temperature)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if batch.old_logprobs is None:
            raise NotProvided("the engine gives the logprobs of all that it samples")
        advantages = self.advantages(batch.rewards, batch.group_ids)
        step = Step(state, rows_of(batch, self.conventions.temperature, advantages), self._config())
        return {ours: float(step.logged[theirs]) for theirs, ours in LOGGED.items() if theirs in step.logged}

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from rlcanary.reference import make_batch

        return self.train_step(state, make_batch(groups, pad_token_id)[0])

    def _config(self) -> Any:
        make, loss = part("prime_rl.configs.trainer:TrainerConfig"), part("prime_rl.configs.trainer:DefaultLossConfig")
        optimizer = {"type": "adamw", "max_norm": self.conventions.max_grad_norm}
        return make(max_steps=1, gc=None, matmul_precision="highest", optim=optimizer, loss=loss(**OFF))
