"""open-instruct's scores, advantages and losses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_learner as learning
import open_instruct_run as run

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import takes
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Completion, Group, LossOutput
from rlcanary.contract.records.credit import Credit
from rlcanary.contract.stand_ins import LogprobModel

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.credit import CreditBatch

NO_PADDING = -1
LOGGED = {
    "loss/policy_avg": "policy_loss",
    "policy/clipfrac_avg": "clip_fraction",
    "policy/entropy_avg": "entropy",
    "val/ratio": "ratio_mean",
}


class Objective(Adapter):
    """What a loss is made of."""

    settings: dict[str, Any]

    def configs(self, **settings: Any) -> run.Configs:
        """Return the configuration of this adapter with other options."""
        return run.configs_of({**self.settings, **settings})

    # Scores

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return self._scored(logits, token_ids, temperature, with_entropy=False)[0]

    def entropy(self, logits: Tensor) -> Tensor:
        import torch

        return self._scored(logits, torch.zeros(logits.shape[:2], dtype=torch.long), 1.0, with_entropy=True)[1]

    def _scored(self, logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Any]:
        """Run `forward_for_logprobs` on a model that has these logits, behind a prompt of one token."""
        import torch
        from open_instruct import grpo_utils

        rows = torch.nn.functional.pad(token_ids, (1, 0))
        shifted = torch.nn.functional.pad(logits, (0, 0, 0, 1))
        places = torch.arange(rows.shape[1]).expand(rows.shape)
        with run.on_cpu():
            found: tuple[Tensor, Any] = grpo_utils.forward_for_logprobs(
                lambda **_: SimpleNamespace(logits=shifted), rows, None, places, NO_PADDING, temperature, with_entropy
            )
        return found

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._of_rows(model, batch, temperature, [[row] for row in range(len(batch.rewards))])

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._of_rows(model, batch, temperature, [list(range(len(batch.rewards)))])

    def _of_rows(self, model: Any, batch: CollatedBatch, temperature: float, packs: list[list[int]]) -> Tensor:
        """Run `compute_logprobs` on packed sequences of these rows."""
        import torch
        from open_instruct import grpo_utils
        from open_instruct.data_types import CollatedBatchData

        kept_BT = tokens_of_completions(batch)
        prompts = prompts_of(batch)
        rows = [torch.cat([prompt, batch.completion_ids[row][kept_BT[row]]]) for row, prompt in enumerate(prompts)]
        masks = [torch.arange(len(ids)) >= len(prompts[row]) for row, ids in enumerate(rows)]
        made: dict[str, list[Tensor]] = {"query_responses": [], "position_ids": [], "response_masks": []}
        for pack in packs:
            made["query_responses"].append(torch.cat([rows[row] for row in pack]).unsqueeze(0))
            made["position_ids"].append(torch.cat([torch.arange(len(rows[row])) for row in pack]).unsqueeze(0))
            made["response_masks"].append(torch.cat([masks[row] for row in pack]).unsqueeze(0))
        data = CollatedBatchData(**made, attention_masks=[], advantages=[], vllm_logprobs=[])
        with run.on_cpu(), run.as_loaded(model):
            use_grad = torch.is_grad_enabled()
            packed = grpo_utils.compute_logprobs(model, data, padding_of(batch), temperature, use_grad=use_grad)
        scored_BT = packed[0].new_full(batch.completion_ids.shape, torch.nan)
        for pack, logprobs in zip(packs, packed, strict=True):
            parts = torch.nn.functional.pad(logprobs[0], (1, 0)).split([len(rows[row]) for row in pack])
            for row, part in zip(pack, parts, strict=True):
                scored_BT[row, kept_BT[row]] = part[len(prompts[row]) :]
        return scored_BT

    # Rewards and advantages

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        masks = torch.ones(len(rewards), 1, dtype=torch.bool)
        return self._credit(rewards, group_ids, masks)[:, 0]

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is not None:
            raise NotProvided("GRPO of open-instruct has no rewards of tokens")
        return Credit(self._credit(batch.rewards, batch.group_ids, batch.mask))

    def _credit(self, rewards: Tensor, group_ids: Tensor, masks: Tensor) -> Tensor:
        """Run the loop that prepares data on rows of a prompt of one token -> [B, T]."""
        import torch

        groups, order = [], []
        for group_id in group_ids.unique():
            rows = (group_ids == group_id).nonzero().flatten().tolist()
            length = masks.shape[1]
            completions = [Completion([1] * length, [0.0] * length, sampled=masks[row].tolist()) for row in rows]
            groups.append(Group([1], completions, rewards[rows].tolist()))
            order += rows
        # mask_truncated_completions is about completions that have no finish reason here.
        made = run.prepared(self.settings, groups, NO_PADDING)
        result = torch.zeros(masks.shape, dtype=rewards.dtype)
        for row, values in zip(order, made.rows("advantages"), strict=True):
            result[row] = values[1:].to(rewards.dtype)
        return result

    def keep_group(self, rewards: Tensor) -> bool:
        """Run `process_group`, by which the loop that prepares data drops a group."""
        from open_instruct import data_loader

        count = len(rewards)
        group = Group([1], [Completion([1], [0.0])] * count, rewards.tolist())
        tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: [""] * len(rows))
        with run.on_cpu():
            kept = data_loader.process_group(
                result=run.result_of(group, 0),
                generation_config=SimpleNamespace(n=count),
                tokenizer=tokenizer,
                dataset=run.dataset_of([[1]]),
                max_possible_score=self.configs().streaming.max_possible_score,
                no_resampling_pass_rate=None,
                iter_dataloader=None,
                filter_zero_std_samples=True,
                replenish_prompts=False,
                param_prompt_Q=None,
                base_env_config=None,
            )
        return kept is not None

    # Losses

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Run the loss on tokens without an advantage."""
        import torch
        from open_instruct import grpo_utils

        configs = self.configs(load_ref_policy=True, beta=1.0)
        ones = torch.ones_like(logprobs)
        found: Tensor = grpo_utils.compute_grpo_loss(
            logprobs, torch.exp(logprobs - logprobs.detach()), 0 * ones, ref_logprobs, configs.args, ones
        )[2]
        return found

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        import torch
        from open_instruct import grpo_utils

        args = self.configs().args
        if not args.use_rho_correction:
            raise NotProvided("use_rho_correction is off")
        trainer = grpo_utils.mask_logprobs(trainer_logprobs.detach(), mask)  # as the step has old logprobs
        sampler = grpo_utils.mask_logprobs(sampler_logprobs, mask)
        correct = grpo_utils.compute_rho_correction
        advantages = {"advantages": torch.zeros_like(trainer)} if takes(correct, "advantages") else {}
        weights: Tensor = correct(trainer, sampler, mask, config=args, **advantages).weights
        return weights

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch, 1, 1)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro, 1)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, 1, n_ranks)

    def _update(self, batch: PolicyBatch, n_micro: int, n_ranks: int) -> LossOutput:
        """Run the learner's step of each rank, with the logprobs that the batch gives."""
        import torch
        from open_instruct import grpo_utils

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the learner counts the tokens of the whole update itself")
        has_reference = self.conventions.kl_coef > 0
        if has_reference and batch.ref_logprobs is None:
            raise NotProvided("beta needs reference logprobs")
        if len(batch.mask) % (n_micro * n_ranks):
            raise NotProvided("micro-batches and ranks are of equal size")
        configs = self.configs(num_mini_batches=1, num_epochs=1, record_entropy=batch.entropy is not None)
        configs.args.world_size = n_ranks
        model = LogprobModel(batch)
        reference = LogprobModel(batch, batch.ref_logprobs) if has_reference else None
        old = torch.nn.functional.pad(batch.old_logprobs, (1, 0))
        pieces = [model.input_ids[rows] for rows in torch.arange(len(batch.mask)).chunk(n_micro * n_ranks)]
        ranks = [pieces[rank * n_micro : (rank + 1) * n_micro] for rank in range(n_ranks)]
        total, logged = 0.0, []

        def scores_of(own: Any, ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Any]:
            return own.weight[ids[:, 0]], None if batch.entropy is None else batch.entropy[ids[:, 0]]

        def old_of(_: Any, number: int, *__: Any) -> Tensor:
            ids = data.query_responses[number]
            return grpo_utils.mask_logprobs(old[ids[:, 0], 1:], data.response_masks[number][:, 1:])  # type: ignore[no-any-return]

        with run.on_cpu():
            batches = [micro_batches_of(batch, own) for own in ranks]
            counts = learning.over_ranks(batches)
            for data in batches:
                engine = learning.Engine(model)
                made = learning.learner(
                    configs, engine, reference, NO_PADDING, SimpleNamespace(get_last_lr=lambda: [0.0])
                )
                with (
                    patch.object(grpo_utils, "forward_for_logprobs", scores_of),
                    patch.object(grpo_utils, "resolve_old_logprob", old_of),
                    patch.object(torch.distributed, "all_reduce", lambda tensor, **_: tensor.copy_(counts)),
                ):
                    logged.append(learning.step(made, data))
                total += engine.loss / n_ranks  # as DeepSpeed's gradients are averaged over ranks
            metrics = learning.logged_of(logged)
        loss = model.loss(total)
        return LossOutput(_averaged(loss, n_ranks), self.renamed(metrics))

    def renamed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update by the contract's names."""
        found = {ours: metrics[theirs] for theirs, ours in LOGGED.items() if theirs in metrics}
        if self.conventions.kl_coef > 0:
            found["kl"] = metrics[f"objective/kl{self.configs().args.kl_estimator}_avg"]
        return found


def _averaged(loss: Tensor, n_ranks: int) -> Tensor:
    """Return the loss with the gradient that is left when gradients are averaged over ranks; its value is that already."""
    return loss.detach() + (loss - loss.detach()) / n_ranks


def padding_of(batch: CollatedBatch) -> int:
    """Return the id of the batch's padding; an id that no token has where it has none, or several."""
    ids = batch.input_ids[~batch.attention_mask.bool()].unique().tolist()
    return int(ids[0]) if len(ids) == 1 else NO_PADDING


def micro_batches_of(batch: PolicyBatch, pieces: Sequence[Tensor]) -> Any:
    """Make the micro-batches of one rank of rows of `LogprobModel`, whose first id is the number of the row."""
    import torch
    from open_instruct.data_types import CollatedBatchData

    advantages_BT = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
    sampler_BT = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs

    def behind_prompt(values_BT: Tensor) -> list[Tensor]:
        padded = torch.nn.functional.pad(values_BT.expand(batch.mask.shape), (1, 0))
        return [padded[ids[:, 0]] for ids in pieces]

    return CollatedBatchData(
        query_responses=list(pieces),
        attention_masks=[torch.ones_like(ids) for ids in pieces],
        position_ids=[torch.arange(ids.shape[1]).expand(ids.shape) for ids in pieces],
        advantages=behind_prompt(advantages_BT),
        response_masks=behind_prompt(batch.mask),
        vllm_logprobs=behind_prompt(sampler_BT),
    )
