"""slime as an adapter: its losses, advantages and rewards on samples, in one process without Ray, SGLang or a GPU."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import slime_run as run
from slime_rollouts import Rollouts
from slime_scoring import Scoring
from slime_settings import conventions_of, settings_for

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group, PolicyBatch
    from rlcanary.contract.records.credit import CreditBatch, ValueBatch
    from rlcanary.contract.records.other_losses import SupervisedBatch
    from rlcanary.contract.records.preparation import Answer


class SlimeAdapter(Scoring, Rollouts):
    """Adapter of slime under some of its options, by default their defaults."""

    name = "slime"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import slime and parse its options.

        Args:
            settings: options by name, such as `{"eps_clip": 0.1}`, and the number of `mini_batches` of a rollout.
        """
        run.imported()
        self.settings = dict(settings or {})
        self.mini_batches: int = self.settings.pop("mini_batches", 1)
        self.args = run.args_of(self.settings)

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        return conventions_of(self.args, self.mini_batches)

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        made = type(self)({**self.settings, "mini_batches": wanted.mini_batches, **settings_for(wanted, changes)})
        for name in changes:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no option of slime for {name}={changes[name]!r}")
        if made.conventions != wanted:
            raise NotProvided("slime has this option together with others alone")
        return made

    # Rewards and advantages

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        if self.conventions.token_credit != "outcome":
            raise NotProvided(f"{self.args.advantage_estimator} gives advantages of tokens")
        masks = list(torch.ones(len(rewards), 1, dtype=torch.int))
        advantages, _ = self._estimated(rewards, group_ids, masks, None)
        return torch.stack([each[0] for each in advantages])

    def token_advantages(self, batch: CreditBatch) -> Credit:
        import torch

        if batch.token_rewards is not None or self.conventions.token_credit == "turn_returns":
            raise NotProvided("slime has no rewards of tokens or turns")
        lengths = _lengths(batch.mask)
        masks = [mask[:length].int() for mask, length in zip(batch.mask, lengths, strict=True)]
        if not all(mask.any() for mask in masks):
            raise NotProvided("reinforce_plus_plus asserts that each row has a trained token")
        values = batch.values
        cut = None if values is None else [row[:length] for row, length in zip(values, lengths, strict=True)]
        advantages, returns = self._estimated(batch.rewards, batch.group_ids, masks, cut)
        width = batch.mask.shape[1]
        padded = [
            torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
            for rows in (advantages, returns)
        ]
        return Credit(padded[0], padded[1] if self.conventions.token_credit == "gae" else None)

    def _estimated(
        self, rewards: Tensor, group_ids: Tensor, masks: list[Tensor], values: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Normalise rewards as the rollout manager does, and run `compute_advantages_and_returns`."""
        import torch
        from slime.backends.megatron_utils.loss import compute_advantages_and_returns
        from slime.utils.types import Sample

        order = torch.argsort(group_ids, stable=True)
        _, counts = torch.unique(group_ids, return_counts=True)
        args = run.args_of(self.settings)
        args.rollout_batch_size, args.n_samples_per_prompt = len(counts), int(counts.max())
        samples = [Sample(reward=float(rewards[row]), group_index=int(group_ids[row])) for row in order]
        with run.on_cpu():
            _, shaped = run.manager(args)._post_process_rewards(samples)
            lengths = [len(masks[row]) for row in order]
            data = {
                "rewards": shaped,
                "log_probs": [torch.zeros(length) for length in lengths],
                "values": None if values is None else [values[row] for row in order],
                "loss_masks": [masks[row] for row in order],
                "response_lengths": lengths,
                "total_lengths": [length + 1 for length in lengths],
            }
            compute_advantages_and_returns(args, data)
        places = torch.argsort(order).tolist()
        return [data["advantages"][row] for row in places], [data["returns"][row] for row in places]

    def keep_group(self, rewards: Tensor) -> bool:
        from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
        from slime.utils.types import Sample

        kept = check_reward_nonzero_std(self.args, [Sample(reward=float(reward)) for reward in rewards])
        return bool(kept.keep)

    def verify(self, answer: Answer) -> bool:
        from slime.rollout.rm_hub import async_rm
        from slime.utils.types import Sample

        types = {("math", "boxed"): "math", ("number", "boxed"): "math", ("number", "line"): "dapo"}
        if (answer.kind, answer.format) not in types:
            raise NotProvided("slime's reward types read \\boxed{} and Answer:")
        if answer.format == "line" and not answer.reference.strip().isdigit():
            raise NotProvided("all answers of the type dapo are integers")
        args = run.args_of({**self.settings, "rm_type": types[answer.kind, answer.format]})
        reward = asyncio.run(async_rm(args, Sample(response=answer.text, label=answer.reference)))
        return (reward["score"] if isinstance(reward, dict) else reward) == 1

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        import torch
        from slime.backends.megatron_utils.loss import apply_opd_kl_to_advantages

        args = run.args_of({**self.settings, "use_opd": True, "opd_kl_coef": 1.0})
        advantages = list(torch.zeros_like(student_logprobs))
        apply_opd_kl_to_advantages(
            args, {"teacher_log_probs": list(teacher_logprobs)}, advantages, list(student_logprobs.detach())
        )
        return torch.stack(advantages)

    # Losses

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        import torch
        from slime.utils.ppo_utils import compute_approx_kl

        with torch.compiler.set_stance("force_eager"):
            return compute_approx_kl(logprobs, ref_logprobs, self.args.kl_loss_type)  # type: ignore[no-any-return]

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        import torch
        from slime.backends.megatron_utils import loss as losses

        if not self.args.use_tis:
            raise NotProvided("use_tis is not set")
        corrected = (
            losses.icepop_function if self.conventions.importance_mode == "mask" else losses.vanilla_tis_function
        )
        weights, _, _ = corrected(
            self.args,
            pg_loss=torch.ones(trainer_logprobs.numel()),
            train_log_probs=list(trainer_logprobs.detach()),  # as policy_loss_function has them
            rollout_log_probs=list(sampler_logprobs),
            loss_masks=list(mask),
        )
        return weights.view(mask.shape)  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch, 1, 1)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro, 1)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, 1, n_ranks)

    def _update(self, batch: PolicyBatch, n_micro: int, n_ranks: int) -> LossOutput:
        """Run `loss_function` on each micro-batch of each rank, with the logprobs that the batch gives."""
        import torch
        from slime.backends.megatron_utils import loss as losses

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the rollout manager counts the rows of the whole update itself")
        if self.conventions.kl_coef and batch.ref_logprobs is None:
            raise NotProvided("use_kl_loss needs reference logprobs")
        if self.args.use_tis and batch.sampler_logprobs is None:
            raise NotProvided("use_tis needs the sampler's logprobs")
        if len(batch.mask) % (n_micro * n_ranks):
            raise NotProvided("micro-batches and ranks are of equal size")
        lengths = _lengths(batch.mask)
        advantages_BT = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        entropy_BT = torch.zeros_like(batch.logprobs) if batch.entropy is None else batch.entropy

        def cut(values: Tensor | None, rows: list[int]) -> list[Tensor] | None:
            return None if values is None else [values[row][: lengths[row]] for row in rows]

        total: Any = 0.0
        logged: list[Any] = []
        for rows in torch.arange(len(batch.mask)).chunk(n_micro * n_ranks):
            own = rows.tolist()
            given = {"log_probs": cut(batch.logprobs, own), "entropy": cut(entropy_BT, own)}
            data = {
                "advantages": cut(advantages_BT.expand(batch.mask.shape), own),
                "log_probs": cut(batch.old_logprobs, own),
                "rollout_log_probs": cut(batch.sampler_logprobs, own),
                "ref_log_probs": cut(batch.ref_logprobs, own),
                "loss_masks": cut(batch.mask.int(), own),
                "rollout_mask_sums": batch.mask[rows].sum(dim=1).float(),
                "response_lengths": [lengths[row] for row in own],
                "total_lengths": [lengths[row] + 1 for row in own],
                "unconcat_tokens": None,
            }
            with (
                run.on_cpu(get_data_parallel_world_size=n_ranks),
                run.patch.object(losses, "get_log_probs_and_entropy", lambda *_, given=given, **__: (None, given)),
                torch.compiler.set_stance("force_eager"),
            ):
                part = functools.partial(run.loss_function(self.args, len(batch.mask)), data, n_micro)
                total = total + run.micro_loss(part, self.args, n_micro, logged)
        if self.args.calculate_per_token_loss:
            # As finalize_model_grads does.
            total = total / sum(float(each["values"][0]) for each in logged)
        else:
            total = total / n_ranks  # as Megatron's gradients are averaged over data-parallel ranks
        metrics = run.reduced(logged, self.args, len(batch.mask))
        names = {"pg_loss": "policy_loss"}
        if self.args.calculate_per_token_loss:
            names |= {"ppo_kl": "approx_kl", "kl_loss": "kl", "pg_clipfrac": "clip_fraction"}
            names |= {} if batch.entropy is None else {"entropy_loss": "entropy"}
        return LossOutput(total, {ours: metrics[theirs] for theirs, ours in names.items() if theirs in metrics})

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        import torch

        if batch.global_tokens is not None or batch.global_sequences is not None or batch.old_values is None:
            raise NotProvided("the rollout manager counts the rows itself, and value clipping has old values")
        lengths = _lengths(batch.mask)
        rows = range(len(lengths))
        data = {
            "values": [batch.old_values[row][: lengths[row]] for row in rows],
            "returns": [batch.returns[row][: lengths[row]] for row in rows],
            "loss_masks": [batch.mask[row][: lengths[row]].int() for row in rows],
            "rollout_mask_sums": batch.mask.sum(dim=1).float(),
            "response_lengths": lengths,
            "total_lengths": [length + 1 for length in lengths],
            "unconcat_tokens": [torch.zeros(length + 1, dtype=torch.long) for length in lengths],
        }
        packed = torch.cat([torch.nn.functional.pad(batch.values[row][: lengths[row]], (0, 1)) for row in rows])
        args = run.args_of(self.settings)
        args.loss_type = "value_loss"  # as train_critic does
        with run.on_cpu():
            loss, _, log = run.loss_function(args, len(lengths))(data, 1, packed.view(1, -1, 1))
        divisor = float(log["values"][0]) if args.calculate_per_token_loss else 1.0
        return LossOutput(loss / divisor)

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        from slime.utils.mask_utils import get_response_lengths
        from slime.utils.types import Sample

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the rollout manager counts the rows of the whole update itself")
        masks = batch.mask.int().tolist()
        lengths = get_response_lengths(masks)
        args = run.args_of({**self.settings, "loss_type": "sft_loss", "global_batch_size": len(masks)})
        # As sft_rollout.generate_rollout makes them.
        samples = [
            Sample(index=row, tokens=ids, response_length=length, reward=0, loss_mask=mask[-length:])
            for row, (ids, mask, length) in enumerate(zip(batch.token_ids.tolist(), masks, lengths, strict=True))
        ]
        with run.on_cpu():
            data = run.rollout_data(args, samples)
            data["unconcat_tokens"] = data["tokens"]
            packed = batch.logits.flatten(0, 1).unsqueeze(0).float()
            loss, _, log = run.loss_function(args, len(lengths))(data, 1, packed)
        divisor = float(log["values"][0]) if args.calculate_per_token_loss else 1.0
        return LossOutput(loss / divisor, {"loss": float(loss / divisor)})

    # Training

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if self.conventions.kl_coef and batch.ref_logprobs is not None:
            raise NotProvided("slime computes the reference's logprobs itself")
        return self._trained(state, self._samples(batch), 1)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        return self._trained(state, [each for own in self.samples_of(groups) for each in own], self.mini_batches)

    def _samples(self, batch: CollatedBatch) -> list[Any]:
        from slime.utils.types import Sample

        data = self._rows(batch)
        logprobs = batch.old_logprobs
        lengths = data["response_lengths"]
        return [
            Sample(
                group_index=int(batch.group_ids[row]),
                index=row,
                tokens=data["tokens"][row].tolist(),
                response_length=lengths[row],
                reward=float(batch.rewards[row]),
                loss_mask=data["loss_masks"][row].tolist(),
                rollout_log_probs=None if logprobs is None else _known(logprobs[row][: lengths[row]]),
                status=Sample.Status.COMPLETED,
            )
            for row in range(len(lengths))
        ]

    def _trained(self, state: Any, samples: list[Any], updates: int) -> dict[str, float]:
        order = [sample.group_index for sample in samples]
        sizes = {order.count(group) for group in order}
        if len(sizes) > 1 or sorted(order) != order or len(samples) % updates:
            raise NotProvided("prompts have n_samples_per_prompt samples, beside each other")
        if self.args.use_kl_loss and state.ref_model is None:
            raise NotProvided("use_kl_loss needs a reference")
        args = run.args_of(self.settings)
        args.n_samples_per_prompt = sizes.pop()
        args.rollout_batch_size = len(samples) // args.n_samples_per_prompt
        args.global_batch_size = len(samples) // updates
        with run.on_cpu():
            data = run.rollout_data(args, samples)
        if args.use_rollout_logprobs and "rollout_log_probs" not in data:
            raise NotProvided("use_rollout_logprobs needs the sampler's logprobs")
        logged = run.trained(args, state, data, has_reference=args.use_kl_loss)
        names = {"train/grad_norm": "grad_norm", "train/loss": "loss", "train/lr-pg_0": "lr"}
        names |= {"train/pg_loss": "policy_loss"} if updates == 1 else {}
        return {ours: float(logged[theirs]) for theirs, ours in names.items() if theirs in logged}


def _known(logprobs: Tensor) -> list[float]:
    return [0.0 if math.isnan(value) else value for value in logprobs.tolist()]


def _lengths(mask: Tensor) -> list[int]:
    """Lengths of rows that end with their last trained token, or of the whole width without one."""
    width = mask.shape[1]
    return [max((place + 1 for place in range(width) if row[place]), default=width) for row in mask.tolist()]
