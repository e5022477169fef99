"""AReaL as an adapter: its actor, critic and FSDP engine's own methods on the CPU, without processes or a GPU.

Written for AReaL of May 2026.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from areal_rollouts import Rollouts
from areal_settings import BASELINE, conventions_of, settings_for

from rlcanary.adapters.batches import micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.credit import CreditBatch, ValueBatch
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.other_losses import PreferenceBatch

# Servers, agents, loggers and Megatron, none of which the code under test calls.
ABSENT = (
    *("megatron", "mbridge", "sglang", "flash_attn", "torch_memory_saver", "transformer_engine", "apex", "pynvml"),
    *("swanlab", "wandb", "tensorboardX", "trackio", "tabulate", "flask", "uvloop", "aiofiles", "openai", "anthropic"),
    *("agents", "litellm", "ring_flash_attn", "orjson", "setproctitle", "kubernetes", "etcd3", "blosc", "hydra"),
)
# GRPO as AReaL's examples have it: rewards are normalised by group, and there is neither KL nor a second normalisation.
GRPO: Mapping[str, Any] = {
    "reward_norm": {"mean_level": "group", "std_level": "group"},
    "adv_norm": None,
    "kl_ctl": 0.0,
    "ppo_n_minibatches": 1,
}


class ArealAdapter(Rollouts):
    """Adapter of AReaL under some settings, by default its own with rewards normalised by group."""

    name = "areal"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import AReaL.

        Args:
            settings: fields of `PPOActorConfig`; `reward_norm`, `adv_norm` and `rejection_sampling` as mappings of theirs.
                `critic_eps_clip` is that of `PPOCriticConfig`.
        """
        with (
            usable("areal", "put a checkout of AReaL on PYTHONPATH, beside colorlog and tenacity", "AReaL of May 2026"),
            absent(*ABSENT),
            quiet(),
        ):
            import areal.engine.fsdp_engine
            import areal.trainer.dpo.dpo_engine
            import areal.trainer.ppo.critic
            import areal.workflow.rlvr  # noqa: F401
        self.settings = {**GRPO, **(settings or {})}
        self.config = self._config()

    def _config(self, group_size: int = 1) -> Any:
        from areal.api.cli_args import NormConfig, PPOActorConfig, RejectionSamplingConfig

        made = {name: value for name, value in self.settings.items() if name != "critic_eps_clip"}
        for name in ("reward_norm", "adv_norm"):
            if made[name] is not None:
                made[name] = NormConfig(**{**made[name], "group_size": group_size})
        if made.get("rejection_sampling") is not None:
            made["rejection_sampling"] = RejectionSamplingConfig(**made["rejection_sampling"])
        with quiet():
            return PPOActorConfig(experiment_name="", trial_name="", path="", **made)

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        return conventions_of(self.config, self.settings)

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        try:
            made = type(self)({**self.settings, **settings_for(wanted, changes)})
        except ValueError as refused:
            raise NotProvided(f"AReaL refuses {changes}: {refused}") from refused
        for name in changes:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no setting of AReaL for {name}={changes[name]!r}")
        kept = made.conventions
        if wanted.token_credit == "gae":
            # Against a critic there is no baseline, so that these say nothing.
            kept = kept.replace(**{name: getattr(wanted, name) for name in BASELINE})
        if kept != wanted:
            raise NotProvided("AReaL has this setting together with others alone")
        return made

    # Scoring

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        from areal.utils.functional import gather_logprobs

        with eager():
            return gather_logprobs(logits, token_ids, temperature)  # type: ignore[no-any-return]

    def entropy(self, logits: Tensor) -> Tensor:
        import torch
        from areal.utils.functional import gather_logprobs_entropy

        with eager():
            return gather_logprobs_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))[1]  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """Score rows one by one, each packed alone, by `_compute_logprobs` of the engine."""
        import torch

        engine = self._engine(temperature=temperature)
        kept_BT = tokens_of_completions(batch)
        width = batch.completion_ids.shape[1]
        rows = []
        for prompt, ids, kept in zip(prompts_of(batch), batch.completion_ids, kept_BT, strict=True):
            whole = torch.cat([prompt, ids[kept]]).unsqueeze(0)
            positions = torch.arange(whole.shape[1]).unsqueeze(0)
            output = model(input_ids=whole, attention_mask=torch.ones_like(whole), position_ids=positions)
            with eager():
                logprobs = engine._compute_logprobs(output.logits.squeeze(0), {"input_ids": whole})
            own = logprobs[len(prompt) - 1 : -1]
            rows.append(torch.nn.functional.pad(own, (0, width - len(own)), value=torch.nan))
        return torch.stack(rows)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from areal.utils.data import KLEstimator

        return KLEstimator(self.config.kl_estimator)(logprobs, ref_logprobs)  # type: ignore[no-any-return]

    # Rewards and advantages

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        mask = torch.ones(len(rewards), 1, dtype=torch.bool)
        found, _ = self._estimated(rewards, group_ids, mask, None)
        return found[:, 0]

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is not None:
            raise NotProvided("AReaL has no rewards of tokens")
        if self.conventions.token_credit == "outcome" and self.config.discount != 1.0:
            raise NotProvided("this adapter declares outcomes without a discount")
        advantages, returns = self._estimated(batch.rewards, batch.group_ids, batch.mask, batch.values)
        return Credit(advantages, returns if self.conventions.token_credit == "gae" else None)

    def _estimated(
        self, rewards: Tensor, group_ids: Tensor, mask: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run `_compute_advantages` on rows behind a prompt of one token -> advantages and returns, [B, T]."""
        import torch

        order = torch.argsort(group_ids, stable=True)
        _, counts = torch.unique(group_ids, return_counts=True)
        width = mask.shape[1]
        ends = (torch.arange(1, width + 1) * mask).amax(dim=1)
        lengths = torch.where(ends > 0, ends, width)
        rows = torch.nn.functional.pad(mask, (1, 0))[order]
        data = {
            "input_ids": torch.zeros(len(rewards), 1 + width, dtype=torch.long),
            "attention_mask": (torch.arange(1 + width) <= lengths[order].unsqueeze(1)),
            "loss_mask": rows.int(),
            "logprobs": torch.zeros(len(rewards), 1 + width),
            "prox_logp": torch.zeros(len(rewards), 1 + width),
            "rewards": rewards[order].clone(),
        }
        if values is not None and self.conventions.token_credit == "gae":
            # A critic also has a value behind the last token, which may be any number.
            known = values.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), 0.0)
            last = known.gather(1, lengths.unsqueeze(1) - 1)
            data["values"] = torch.cat([known, last], dim=1)[order]
        with quiet():
            found = self._actor(int(counts.max()))._compute_advantages(data)
        places = torch.argsort(order)
        return found["advantages"][places][:, :width], found["returns"][places][:, :width]

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        import torch
        from areal.utils.functional import reward_overlong_penalty

        if not self.config.overlong_reward_penalty:
            raise NotProvided("overlong_reward_penalty is not set")
        width = int(lengths.completions.max())
        mask = torch.arange(width) < lengths.completions.unsqueeze(1)
        data = {"rewards": rewards.clone(), "input_ids": mask.long(), "loss_mask": mask.long()}
        found: Tensor = reward_overlong_penalty(
            data, self.config.overlong_tokens, self.config.overlong_penalty_factor, lengths.max_new_tokens
        )["rewards"]
        return found

    # Losses

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        from areal.utils.functional.functional import apply_rejection_sampling

        if self.conventions.importance_level == "none":
            raise NotProvided("rejection_sampling is not set")
        found: Tensor = apply_rejection_sampling(
            trainer_logprobs, sampler_logprobs, mask, None, self.config.rejection_sampling
        ).behave_imp_weight
        return found

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch, 1, 1)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro, 1)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, 1, n_ranks)

    def _update(self, batch: PolicyBatch, n_micro: int, n_ranks: int) -> LossOutput:
        """Run the actor's update, whose engine scales the losses of the micro-batches of all ranks."""
        import torch

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the engine counts the tokens of the whole update itself")
        if self.conventions.importance_level != "none" and batch.sampler_logprobs is None:
            raise NotProvided("rejection_sampling needs the sampler's logprobs")
        pieces = micro_batches(batch, n_micro * n_ranks)
        engine = self._engine(n_ranks=n_ranks)
        losses: list[Any] = []

        def train_batch(_: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
            total = sum(loss_weight_fn({"loss_mask": piece.mask}) for piece in pieces)
            for piece in pieces:
                entropy = torch.zeros_like(piece.logprobs) if piece.entropy is None else piece.entropy
                scored = (piece.logprobs, entropy)
                engine._compute_logprobs_entropy = lambda *_, scored=scored: scored
                context = SimpleNamespace(
                    mb_input=self._input(piece), model_inputs=None, ulysses_pad_size=0, pad_length=0, trie_node=None
                )
                logits = piece.logprobs.unsqueeze(-1)
                losses.append(
                    engine._compute_logprobs_and_loss(
                        logits, context, loss_fn, loss_weight_fn, total, loss_multiplier=n_ranks
                    )
                )
            return {}

        actor = self._actor(1)
        actor.engine = SimpleNamespace(train=lambda: None, get_version=lambda: 0, train_batch=train_batch)
        data = self._input(batch)
        zeros = torch.zeros_like(batch.mask, dtype=torch.float)
        # FSDP averages the gradients of ranks.
        with _logged() as stats, quiet():
            actor._ppo_update({**data, "kl_rewards": zeros, "tot_rewards": zeros, "rewards": zeros[:, 0]})
        loss = torch.stack(losses).sum() / n_ranks
        names = {
            "clip_ratio/avg": "clip_fraction",
            "importance_weight/avg": "ratio_mean",
            "actor_loss/avg": "policy_loss",
        }
        if batch.entropy is not None:
            names["entropy/avg"] = "entropy"
        found = {ours: stats.get(f"ppo_actor/update/{theirs}") for theirs, ours in names.items()}
        return LossOutput(loss, {name: float(value) for name, value in found.items() if value is not None})

    def _input(self, batch: PolicyBatch) -> dict[str, Any]:
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        is_decoupled = self.conventions.importance_level != "none"
        return {
            "input_ids": batch.mask.long(),
            "attention_mask": batch.mask.new_ones(batch.mask.shape),
            "loss_mask": batch.mask.float(),
            "logprobs": batch.sampler_logprobs if is_decoupled else batch.old_logprobs,
            "prox_logp": batch.old_logprobs,
            "advantages": advantages.expand(batch.mask.shape),
        }

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        import functools

        import torch
        from areal.trainer.ppo.critic import ppo_loss_fn

        if batch.global_tokens is not None or batch.global_sequences is not None or batch.old_values is None:
            raise NotProvided("the engine counts the tokens of the update itself, and value clipping needs old values")
        engine = self._engine(is_critic=True)
        fields = {"values": batch.old_values, "returns": batch.returns, "loss_mask": batch.mask.float()}
        fields |= {"input_ids": batch.mask.long(), "attention_mask": batch.mask.new_ones(batch.mask.shape)}

        def packed(values: Tensor) -> Tensor:
            # Behind each row is the position of its last token, which is no state.
            return torch.nn.functional.pad(values, (0, 1)).flatten()

        data = {name: packed(value) for name, value in fields.items()}
        context = SimpleNamespace(mb_input=data, ulysses_pad_size=0, pad_length=0)
        weight = lambda each: each["loss_mask"].count_nonzero()  # noqa: E731 as the critic has it
        with _logged() as stats, quiet():
            loss = engine._compute_logprobs_and_loss(
                packed(batch.values),
                context,
                functools.partial(ppo_loss_fn, eps_clip=self.conventions.value_clip),
                weight,
                weight(data),
            )
        fraction = stats.get("clip_ratio/avg")
        return LossOutput(loss, {} if fraction is None else {"value_clip_fraction": float(fraction)})

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        import torch
        from areal.trainer.dpo.dpo_engine import compute_dpo_loss

        if batch.global_pairs is not None or batch.global_tokens is not None or batch.ref_chosen_logprobs is None:
            raise NotProvided("the engine counts the pairs of the update itself, and there is always a reference")
        assert batch.ref_rejected_logprobs is not None
        pairs = [
            (batch.chosen_logprobs, batch.ref_chosen_logprobs, batch.chosen_mask),
            (batch.rejected_logprobs, batch.ref_rejected_logprobs, batch.rejected_mask),
        ]
        # Packed rows [chosen, rejected, …], whose last position predicts nothing.
        rows = [tuple(each[pair] for each in side) for pair in range(len(batch.chosen_mask)) for side in pairs]
        lengths = torch.tensor([0, *(len(mask) + 1 for _, _, mask in rows)])
        data = {
            "cu_seqlens": lengths.cumsum(0),
            "loss_mask": torch.cat([torch.nn.functional.pad(mask, (1, 0)) for _, _, mask in rows]),
            "ref_logprobs": torch.cat([torch.nn.functional.pad(ref, (0, 1)) for _, ref, _ in rows]),
        }
        logprobs = torch.cat([torch.nn.functional.pad(own, (0, 1)) for own, _, _ in rows])
        kind = {"sigmoid": "sigmoid", "ipo": "ipo"}.get(self.conventions.preference_kind)
        with _logged() as stats, quiet():
            loss = compute_dpo_loss(logprobs, None, data, beta=self.conventions.preference_beta, loss_type=str(kind))
        names = ("loss", "chosen_reward", "rejected_reward", "reward_accuracy", "reward_margin")
        return LossOutput(loss, {name: float(stats[f"{name}/avg"]) for name in names if f"{name}/avg" in stats})

    # AReaL's objects

    def _actor(self, group_size: int) -> Any:
        from areal.trainer.ppo.actor import PPOActor

        with quiet():
            return PPOActor(self._config(group_size), None)

    def _engine(self, n_ranks: int = 1, temperature: float = 1.0, is_critic: bool = False) -> Any:
        from areal.engine.fsdp_engine import FSDPEngine

        engine = FSDPEngine.__new__(FSDPEngine)
        engine.config = SimpleNamespace(is_critic=is_critic, temperature=temperature)
        engine.enable_tree_training = False
        engine.parallel_helper = SimpleNamespace(dp_size=n_ranks, tp_size=1, sp_size=1, tp_group=None)
        return engine


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions as they are written."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _logged() -> Iterator[dict[str, Any]]:
    """Collect what AReaL's tracker of statistics would log of the block."""
    from areal.utils import stats_tracker

    found: dict[str, Any] = {}
    stats_tracker.export_all()
    yield found
    found.update(stats_tracker.export_all())
