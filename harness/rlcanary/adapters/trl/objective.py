"""The objective and its parts: logprobs, masks, advantages and losses.

TRL computes them inside private methods of the trainer, so these methods of the trainer are driven with given rewards,
tokens and logprobs instead of retyping their formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import kl_of_each_token, micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.conventions import of_the_release
from rlcanary.adapters.trl.trainer.ranks import Ranks
from rlcanary.adapters.trl.trainer.state import METRICS, group_size
from rlcanary.adapters.trl.trainer.trainers import PROMPT, PROMPT_IDS, logged
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.lengths import Lengths


class TrlObjective(TrlBase):
    """The parts of an update's loss, and the loss itself."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        from trl.trainer.utils import selective_log_softmax

        if "temperature" in releases.parameters(selective_log_softmax):
            return selective_log_softmax(logits, token_ids, temperature=temperature)  # type: ignore[no-any-return]
        # The trainer divides them itself.
        return selective_log_softmax(logits / temperature, token_ids)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch
        from trl.trainer.utils import pad

        trainer, outputs = self._trainer, ("log_probs", "entropy")
        patched = releases.fused(copy.deepcopy(model), temperature=temperature, outputs=outputs)
        trainer.temperature = temperature
        prompts = prompts_of(batch)
        prompt_ids = pad(prompts, padding_value=0, padding_side="left")
        prompt_mask = pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left")
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(
            patched,
            torch.cat([prompt_ids, batch.completion_ids], dim=1),
            torch.cat([prompt_mask, tokens_of_completions(batch).long()], dim=1),
            batch.completion_ids.shape[1],
        )
        return logprobs  # type: ignore[no-any-return]

    def entropy(self, logits: Tensor) -> Tensor:
        from trl.trainer.utils import entropy_from_logits

        return entropy_from_logits(logits)  # type: ignore[no-any-return]

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        import torch

        trainer = self._trainer
        releases.use_ends(trainer, eos_token_ids)
        releases.use_padding(trainer, pad_token_id)
        prompts = [PROMPT_IDS] * len(completion_ids)
        # The trainer cuts generated ids at the first EOS; the rows' lengths are its completion mask.
        trainer.model.generate = lambda input_ids, **_: torch.cat([input_ids, completion_ids], dim=1)
        completions, _ = releases.single_turn(trainer, prompts, 1)
        lengths = torch.tensor([len(ids) for ids in completions])
        return torch.arange(completion_ids.shape[1]) < lengths.unsqueeze(1)

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        import torch
        from trl.rewards import get_soft_overlong_punishment

        if self.overlong_buffer is None:
            raise NotProvided("the soft punishment of overlong completions is not among the reward functions")
        punish = get_soft_overlong_punishment(lengths.max_new_tokens, self.overlong_buffer)
        return rewards + torch.tensor(punish([[5] * int(length) for length in lengths.completions]))

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        size = group_size(group_ids.tolist())
        if size < 2:
            raise NotProvided("num_generations has to be at least 2")
        trainer = self._trainer
        # The given completions are replayed in the place of an engine's.
        trainer.use_vllm, trainer.num_generations = False, size
        trainer.model.train()
        items = [{"prompt": PROMPT, "given_reward": float(reward)} for reward in rewards]
        with quiet():
            scored = trainer._generate_and_score_completions(items)
        return scored["advantages"]  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._loss_of_pieces([batch], batch)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._loss_of_pieces(micro_batches(batch, n_micro), batch)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Compute each token's KL as the trainer's loss of it alone with advantage zero and beta 1."""
        return kl_of_each_token(lambda token: _with_beta_one().policy_loss(token).loss, logprobs, ref_logprobs)

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        return self._weights(trainer_logprobs, sampler_logprobs, mask).expand(mask.shape)

    def _weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return what the trainer computes from vLLM's logprobs and its own when it scores completions: [B, T] or [B, 1]."""
        trainer, rows = self._trainer, len(mask)
        if self.conventions.importance_level == "none":
            raise NotProvided("this configuration does not correct for vLLM's logprobs")
        trainer.num_generations = rows
        trainer.model.train()
        # No request is sent to an engine.
        trainer._last_loaded_step = trainer.state.global_step
        given = releases.scores(trainer, trainer_logprobs, None)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: given
        trainer.rollout_func = lambda *_: {
            "prompt_ids": [PROMPT_IDS] * rows,
            "completion_ids": [[6] * mask.shape[1]] * rows,
            "logprobs": sampler_logprobs.tolist(),
            "env_mask": mask.long().tolist(),
        }
        scored = trainer._generate_and_score_completions([{"prompt": PROMPT, "given_reward": 0.0}] * rows)
        return scored["importance_sampling_ratio"]  # type: ignore[no-any-return]

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        import torch

        _require_whole(batch)
        if not releases.has_rollout_func():
            raise NotProvided("the ranks of trainers without a rollout_func wait for each other without end here")
        if len(batch.mask) % n_ranks:
            raise NotProvided("ranks have to have equally many rows")
        pieces = micro_batches(batch, n_ranks)

        def work(rank: int, trainer: Any) -> tuple[Tensor, dict[str, float]]:
            loss = self._loss_of_piece(trainer, pieces[rank], batch.mask.sum())
            return loss, _logged(trainer, batch)

        trainer = self._prepared(1)
        with quiet():
            results = Ranks(n_ranks).run(work, trainer)
        # The average of the ranks' gradients, as data parallelism has it.
        return LossOutput(torch.stack([loss for loss, _ in results]).mean(), results[0][1])

    def _loss_of_pieces(self, pieces: list[PolicyBatch], whole: PolicyBatch) -> LossOutput:
        import torch

        _require_whole(whole)
        trainer = self._prepared(len(pieces))
        losses = [self._loss_of_piece(trainer, piece, whole.mask.sum()) for piece in pieces]
        return LossOutput(torch.stack(losses).sum(), _logged(trainer, whole))

    def _prepared(self, n_micro: int) -> Any:
        """Return a trainer in an update of so many micro-batches."""
        trainer = self._trainer
        trainer.model.train()
        trainer._metrics["train"].clear()
        trainer.current_gradient_accumulation_steps = n_micro
        trainer.args.steps_per_generation = n_micro
        return trainer

    def _loss_of_piece(self, trainer: Any, piece: PolicyBatch, tokens_of_update: Tensor) -> Tensor:
        import torch

        # The model's forward pass is replaced by the given logprobs and entropies; the rest is the trainer's.
        entropy = torch.zeros_like(piece.logprobs) if piece.entropy is None else piece.entropy
        given = releases.scores(trainer, piece.logprobs, entropy)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: given
        inputs = _loss_inputs(piece, tokens_of_update)
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            if piece.sampler_logprobs is None:
                raise NotProvided("the correction needs the sampler's logprobs")
            inputs["importance_sampling_ratio"] = self._weights(piece.old_logprobs, piece.sampler_logprobs, piece.mask)
        loss: Tensor = trainer._compute_loss(trainer.model, inputs)
        return loss


def _require_whole(batch: PolicyBatch) -> None:
    if batch.global_tokens is not None or batch.global_sequences is not None:
        raise NotProvided("the trainer counts the tokens of the whole update itself")


def _logged(trainer: Any, batch: PolicyBatch) -> dict[str, float]:
    metrics = logged(trainer, METRICS)
    if batch.entropy is None:
        metrics.pop("entropy", None)
    return metrics


def _loss_inputs(batch: PolicyBatch, tokens_of_update: Tensor) -> dict[str, Tensor]:
    """Return the inputs of the trainer's `_compute_loss`."""
    import torch

    rows = len(batch.mask)
    inputs = {
        "prompt_ids": torch.full((rows, 1), 5),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.full(batch.mask.shape, 5),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "num_items_in_batch": tokens_of_update,
    }
    if batch.ref_logprobs is not None:
        inputs["ref_per_token_logps"] = batch.ref_logprobs
    return inputs


@cache
def _with_beta_one() -> TrlObjective:
    return TrlObjective(**of_the_release({"beta": 1.0, "loss_type": "grpo", "use_bias_correction_kl": False}))
