"""verl's scoring, objective and critic: the engine's forward-backward loop on a given model or on given logprobs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.verl.losses.configured import Configured
from rlcanary.adapters.verl.losses.credit import OF_ROWS, estimated, value_loss
from rlcanary.adapters.verl.losses.options import LOSS_MODES
from rlcanary.adapters.verl.workers.engine import (
    given_outputs,
    jagged,
    new_engine,
    on_ranks,
    sent,
    sequences,
    tensordict,
)
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit, CreditBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.credit import ValueBatch


class Objective(Configured):
    """The parts of a loss, and the loss itself."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch

        engine = new_engine(self._actor_config, None)
        tokens = token_ids.numel()
        takes_processor = "logits_processor_func" in inspect.signature(engine.prepare_model_outputs).parameters
        outputs = engine.prepare_model_outputs(
            output=SimpleNamespace(logits=logits.reshape(1, tokens, -1)),
            output_args={
                "input_ids_rmpad_rolled": token_ids.flatten(),
                "temperature_rmpad": torch.full((tokens,), temperature),
                "temperature_is_one": temperature == 1.0,
                "pad_size": 0,
            },
            micro_batch=tensordict({"input_ids": jagged(token_ids)}, use_remove_padding=True),
            **({"logits_processor_func": None} if takes_processor else {}),
        )
        return outputs["log_probs"].values().view(token_ids.shape)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, use_remove_padding=False)

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, use_remove_padding=True)

    def entropy(self, logits: Tensor) -> Tensor:
        from verl.utils.torch_functional import entropy_from_logits

        return entropy_from_logits(logits)  # type: ignore[no-any-return]

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        import torch
        from verl.utils.torch_functional import get_response_mask

        return get_response_mask(completion_ids, list(eos_token_ids), dtype=torch.bool)  # type: ignore[no-any-return]

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        config = self._algorithm_config
        if config.adv_estimator not in OF_ROWS:
            raise NotProvided(f"the estimator {config.adv_estimator} gives advantages of tokens")
        of_one_token = CreditBatch(rewards, torch.ones(len(rewards), 1, dtype=torch.bool), group_ids)
        return estimated(config, of_one_token)[0].squeeze(1)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        advantages_BT, returns_BT = estimated(self._algorithm_config, batch)
        return Credit(advantages_BT, returns_BT if self._algorithm_config.adv_estimator == "gae" else None)

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        import torch

        response_from_nested = part("verl.workers.utils.padding:response_from_nested")
        fields, rows = sequences(batch), len(batch.rewards)
        data = tensordict(fields, temperature=self.temperature, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows)

        def on_rank(_: int, group: Any) -> Tensor:
            engine = new_engine(self._actor_config, group, model, kind="FSDPEngineWithValueHead")
            with engine.eval_mode():
                output = engine.infer_batch(data, loss_function=None)["model_output"]["values"]
            values: Tensor = torch.nested.to_padded_tensor(response_from_nested(output, fields["response_mask"]), 0.0)
            return values

        values: Tensor
        (values,) = on_ranks(1, on_rank)
        return values

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        return value_loss(batch, self._critic_config, self.conventions.aggregation_constant)

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro=n_micro)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, n_ranks=n_ranks)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from verl.trainer.ppo.core_algos import kl_penalty

        algorithm, actor = self._algorithm_config, self._actor_config
        kind = algorithm.kl_penalty if algorithm.use_kl_in_reward else actor.kl_loss_type
        return kl_penalty(logprobs, ref_logprobs, kind)  # type: ignore[no-any-return]

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        if self.conventions.importance_level == "none":
            raise NotProvided("rollout_correction.rollout_is is not set")
        return self._corrected(trainer_logprobs, sampler_logprobs, mask)["rollout_is_weights"]

    def _scored(self, model: Any, batch: CollatedBatch, temperature: float, use_remove_padding: bool) -> Tensor:
        """Run the engine's forward step and read its output where the loss does."""
        from verl.workers.utils.padding import no_padding_2_padding

        data = tensordict(
            sequences(batch),
            temperature=temperature,
            max_response_len=batch.completion_ids.shape[1],
            use_remove_padding=use_remove_padding,
        )
        scored = []

        def read(model_output: dict[str, Tensor], data: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            scored.append(no_padding_2_padding(model_output["log_probs"], data))
            return scored[0].sum(), {}

        def on_rank(_: int, group: Any) -> None:
            new_engine(self._actor_config, group, model).forward_step(data, loss_function=read, forward_only=False)

        on_ranks(1, on_rank)
        return scored[0]  # type: ignore[no-any-return]

    def _update(self, batch: PolicyBatch, n_micro: int = 1, n_ranks: int = 1) -> LossOutput:
        """Run the engine's `forward_backward_batch` on each rank, and average the ranks' gradients as FSDP does.

        The backward passes end at leaves that collect the weight with which each piece's loss went backward.
        """
        from verl.utils.tensordict_utils import chunk_tensordict
        from verl.workers.utils.losses import ppo_loss

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the engine counts the tokens of the whole update itself")
        if len(batch.mask) % (n_ranks * n_micro):
            raise NotProvided("ranks and micro-batches have to be of equal size")
        with quiet():
            chunks = chunk_tensordict(self._update_data(batch, len(batch.mask) // (n_ranks * n_micro)), n_ranks)

        def on_rank(rank: int, group: Any) -> tuple[Tensor, dict[str, Any]]:
            losses, leaves = [], []

            def loss_function(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, Any]:
                loss, metrics = ppo_loss(self._actor_config, model_output, data, dp_group)
                losses.append(loss)
                leaves.append(loss.detach().requires_grad_())
                return leaves[-1], metrics

            engine = new_engine(self._actor_config, group, model=lambda **_: None)
            engine.prepare_model_outputs = partial(given_outputs, batch)
            output = engine.forward_backward_batch(chunks[rank], loss_function)
            return sum(leaf.grad * loss for leaf, loss in zip(leaves, losses, strict=True)), output["metrics"]

        losses, metrics = zip(*on_ranks(n_ranks, on_rank), strict=True)
        return LossOutput(sum(losses) / n_ranks, self._metrics(metrics))

    def _update_data(self, batch: PolicyBatch, micro_batch_size: int) -> Any:
        """Return the data that the trainer sends to its workers, with one-token prompts and rows without padding."""
        import torch

        rows, width = batch.mask.shape
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        fields = {
            "response_mask": batch.mask.long(),
            "old_log_probs": batch.old_logprobs,
            "advantages": advantages.expand(rows, width),
        }
        if batch.ref_logprobs is not None:
            fields["ref_log_prob"] = batch.ref_logprobs
        if self.conventions.importance_level != "none":
            if batch.sampler_logprobs is None:
                raise NotProvided("rollout correction needs the sampler's logprobs")
            fields |= self._corrected(batch.old_logprobs, batch.sampler_logprobs, batch.mask)
        tokens = torch.zeros(rows, 1 + width, dtype=torch.long)
        return tensordict(
            {name: sent(values) for name, values in fields.items()}
            | {
                "loss_mask": sent(batch.mask.long()),
                "input_ids": jagged(tokens),
                "position_ids": jagged(torch.arange(1 + width).expand(rows, -1)),
                "prompts": sent(tokens[:, :1]),
                "responses": sent(tokens[:, 1:]),
                "row": torch.arange(rows),
            },
            temperature=1.0,
            global_batch_size=rows,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro_batch_size,
        )

    def _corrected(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the fields that the trainer adds or changes in a batch for its rollout correction."""
        from verl.protocol import DataProto
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        data = DataProto.from_dict(
            tensors={
                "old_log_probs": trainer_logprobs,
                "rollout_log_probs": sampler_logprobs,
                "response_mask": mask.long(),
            }
        )
        data, _ = compute_rollout_correction_and_add_to_batch(data, self._algorithm_config.rollout_correction)
        return {name: data.batch[name] for name in ("response_mask", "rollout_is_weights")}

    def _metrics(self, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Join the metrics of micro-batches and ranks."""
        from verl.utils.metric import Metric

        logged = {
            name: float(Metric.aggregate_dp([metrics[name] for metrics in of_ranks]))
            for name, value in of_ranks[0].items()
            if isinstance(value, Metric)
        }
        return self._named(logged)

    def _named(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Rename metrics to ours; those aggregated like the loss are means over tokens under one aggregation only."""
        metrics = {"policy_loss": logged["actor/pg_loss"]}
        mode = self._actor_config.policy_loss.loss_mode
        if mode == "vanilla":  # others count something else there
            metrics["dual_clip_fraction"] = logged["actor/pg_clipfrac_lower"]
        if mode in LOSS_MODES:  # a loss of the user's logs what it likes
            metrics["clip_fraction"] = logged["actor/pg_clipfrac"] + logged["actor/pg_clipfrac_lower"]
            metrics["approx_kl"] = logged["actor/ppo_kl"]
        if self.conventions.aggregation == "token_mean":
            names = {"kl_loss": "kl", "actor/kl_loss": "kl", "actor/entropy_loss": "entropy"}
            metrics |= {ours: logged[theirs] for theirs, ours in names.items() if theirs in logged}
        return metrics
