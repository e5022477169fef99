"""NeMo RL's advantage estimator, loss and filter of groups."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rlcanary.adapters.batches import kl_of_each_token, micro_batches
from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.nemo_rl.base import NemoRlBase
from rlcanary.adapters.nemo_rl.options import Entries
from rlcanary.adapters.nemo_rl.other_losses import scored
from rlcanary.adapters.nemo_rl.worker import importing
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import PolicyBatch
    from rlcanary.contract.records.credit import CreditBatch

METRICS = {
    "kl_penalty": "kl",
    "probs_ratio": "ratio_mean",
    "probs_ratio_min": "ratio_min",
    "probs_ratio_max": "ratio_max",
    "token_mult_prob_error": "mult_prob_error",
}


class Objective(NemoRlBase):
    """Advantages and the policy's loss."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch

        if temperature != 1.0:
            raise NotProvided("the policy worker scales the logits before it scores them")
        return scored(torch.nn.functional.pad(logits, (0, 0, 0, 1)), torch.nn.functional.pad(token_ids, (1, 0)))

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return self.estimated(rewards, group_ids, rewards.new_ones(len(rewards), 1)).squeeze(1)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is not None:
            raise NotProvided("the estimator of GRPO has no rewards of tokens")
        return Credit(self.estimated(batch.rewards, batch.group_ids, batch.mask.float()))

    def estimated(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """Estimate the advantages [B, S] of the tokens of a mask."""
        from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator

        estimator = GRPOAdvantageEstimator(self.advantage_config, self.loss_config)
        found: Tensor = estimator.compute_advantage(prompt_ids=group_ids.unsqueeze(1), rewards=rewards, mask=mask)
        return found

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        loss, metrics = self._call(batch, batch)
        return LossOutput(loss, self.renamed(metrics, batch.sampler_logprobs))

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Accumulate as the workers do: micro-batches get the whole update's counts; losses and metrics are added."""
        import torch

        pieces = micro_batches(batch, n_micro)
        return LossOutput(torch.stack([self._call(piece, batch)[0] for piece in pieces]).sum())

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Compute each token's KL as its loss with advantage zero and penalty 1."""
        only_kl = self.configured(kl_coef=1.0)
        return kl_of_each_token(lambda token: only_kl.policy_loss(token).loss, logprobs, ref_logprobs)

    def keep_group(self, rewards: Tensor) -> bool:
        """Decide as dynamic sampling does when enabled; a group that it keeps only in part counts as dropped."""
        import torch

        with importing():
            from nemo_rl.algorithms.grpo import dynamic_sampling
        from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        baseline, std = calculate_baseline_and_std_per_prompt(
            torch.zeros(len(rewards), 1),
            rewards,
            torch.ones_like(rewards),
            leave_one_out_baseline=self.advantage_config.use_leave_one_out_baseline,
        )
        grpo = Entries(
            use_dynamic_sampling=True,
            num_prompts_per_step=1,
            num_generations_per_prompt=len(rewards),
            dynamic_sampling_max_gen_batches=2,
            deduplicate_multimodal_data=False,
        )
        timer = SimpleNamespace(time=lambda _: contextlib.nullcontext())
        # Its first entry gives the size of a batch, and the reward is not cut to the kept groups.
        batch = BatchedDataDict({"idx": torch.arange(len(rewards)), "total_reward": rewards})
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            kept, *_ = dynamic_sampling(batch, std, baseline, 1, SimpleNamespace(grpo=grpo), timer)
        return kept.size == len(rewards)  # type: ignore[no-any-return]

    def _call(self, piece: PolicyBatch, whole: PolicyBatch) -> tuple[Tensor, dict[str, float]]:
        import torch
        from nemo_rl.algorithms.loss import ClippedPGLossFn
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        if whole.global_tokens is not None or whole.global_sequences is not None:
            raise NotProvided("the workers count the tokens of the whole update themselves")
        conventions = self.conventions
        if conventions.importance_level != "none" and piece.sampler_logprobs is None:
            raise NotProvided("the correction needs the sampler's logprobs")

        def shifted(values: Tensor) -> Tensor:
            """Prepend a column for the first token of a sequence, which has no logprob."""
            return torch.nn.functional.pad(values, (1, 0))

        rows, width = piece.mask.shape
        advantages = piece.advantages.unsqueeze(1) if piece.advantages.ndim == 1 else piece.advantages
        sampled = piece.old_logprobs if piece.sampler_logprobs is None else piece.sampler_logprobs
        data = {
            "input_ids": torch.zeros(rows, 1 + width, dtype=torch.long),
            "token_mask": shifted(piece.mask.float()),
            "sample_mask": torch.ones(rows),
            "advantages": shifted(advantages.expand(rows, width)),
            "prev_logprobs": shifted(piece.old_logprobs),
            "generation_logprobs": shifted(sampled),
        }
        if piece.ref_logprobs is not None:
            data["reference_policy_logprobs"] = shifted(piece.ref_logprobs)
        elif conventions.kl_coef:
            raise NotProvided("reference_policy_kl_penalty needs reference logprobs")
        loss, metrics = ClippedPGLossFn(self.loss_config)(
            next_token_logprobs=piece.logprobs,
            data=BatchedDataDict(data),
            global_valid_seqs=torch.tensor(float(len(whole.mask))),
            global_valid_toks=whole.mask.sum().float(),
        )
        return loss, metrics

    def renamed(self, logged: Mapping[str, float], sampler_logprobs: Tensor | None) -> dict[str, float]:
        """Give the metrics of the loss the names of the contract; those that say nothing here are left out."""
        names = dict(METRICS)
        if not self.conventions.kl_coef or self.conventions.aggregation != "token_mean":
            del names["kl_penalty"]
        if sampler_logprobs is None:
            del names["token_mult_prob_error"]
        return {ours: float(logged[theirs]) for theirs, ours in names.items()}
