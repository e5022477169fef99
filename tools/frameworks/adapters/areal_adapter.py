"""AReaL as an adapter: its actor, critic and FSDP engine's own methods on the CPU, without processes or a GPU.

Written for AReaL of May 2026.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import Adapter, Item, NotProvided
from rlcanary.contract.batch import Completion, Group, LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.credit import CreditBatch, ValueBatch
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.other_losses import PreferenceBatch
    from rlcanary.contract.records.preparation import Answer

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


class ArealAdapter(Adapter):
    """Adapter of AReaL under some settings, by default its own with rewards normalised by group."""

    name = "areal"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import AReaL.

        Args:
            settings: fields of `PPOActorConfig`; `reward_norm`, `adv_norm` and `rejection_sampling` as mappings of theirs.
                `critic_eps_clip` is that of `PPOCriticConfig`.
        """
        with usable("areal", "put a checkout of AReaL on PYTHONPATH, beside colorlog and tenacity", "AReaL of May 2026"):
            with absent(*ABSENT), quiet():
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
        """Translate the settings into conventions."""
        from areal.api.cli_args import PPOCriticConfig

        config = self.config
        norm, white, correction = config.reward_norm, config.adv_norm, config.rejection_sampling
        levels = {"group": "group", "batch": "batch", None: "none"}
        is_masked = correction is not None and correction.action == "mask"
        return Conventions(
            advantage_baseline=("leave_one_out" if norm.mean_leave1out else "mean") if norm and norm.mean_level else "none",
            advantage_scale=levels[norm.std_level] if norm else "none",  # type: ignore[arg-type]
            advantage_ddof=int(norm.std_unbiased) if norm else 1,
            advantage_eps=norm.eps if norm else 1e-5,
            advantage_std_of_others=False,
            singleton_group="zero",
            reward_clip=config.reward_clip,
            token_credit="gae" if self.settings.get("gae_lambda") is not None else "outcome",
            discount=config.discount,
            gae_lambda=config.gae_lambda,
            whitening="mean_std" if white else "none",
            whitening_ddof=int(white.std_unbiased) if white else 1,
            overlong_buffer=config.overlong_tokens if config.overlong_reward_penalty else None,
            overlong_penalty=config.overlong_penalty_factor or 1.0,
            objective="sapo" if config.use_sapo_loss else "clip",
            sapo_temperature_positive=config.sapo_tau_pos,
            sapo_temperature_negative=config.sapo_tau_neg,
            ratio_level=config.importance_sampling_level,
            clip_low=config.eps_clip,
            clip_high=config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher,
            dual_clip=config.c_clip,
            aggregation="token_mean",
            kl_estimator=config.kl_estimator,
            kl_coef=config.kl_ctl,
            kl_placement="reward",
            kl_output_clamp=10.0,
            importance_level=correction.level if correction and config.use_decoupled_loss else "none",
            importance_mode="mask" if is_masked else "truncate",
            importance_low=(correction.lower or 0.0) if correction else 0.0,
            importance_high=correction.upper if correction else 2.0,
            value_clip=self.settings.get("critic_eps_clip", PPOCriticConfig.eps_clip),
            value_coef=0.5,
            mini_batches=config.ppo_n_minibatches,
            temperature=config.temperature,
            approx_kl_estimator="k1",
            preference_beta=0.1,
        )

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        try:
            made = type(self)({**self.settings, **settings_for(self.settings, wanted, changes)})
        except ValueError as refused:
            raise NotProvided(f"AReaL refuses {changes}: {refused}") from refused
        for name in changes:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no setting of AReaL for {name}={changes[name]!r}")
        if made.conventions != wanted:
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
        names = {"clip_ratio/avg": "clip_fraction", "importance_weight/avg": "ratio_mean", "actor_loss/avg": "policy_loss"}
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

        from areal.trainer.ppo.critic import ppo_loss_fn

        if batch.global_tokens is not None or batch.global_sequences is not None or batch.old_values is None:
            raise NotProvided("the engine counts the tokens of the update itself, and value clipping needs old values")
        engine = self._engine(is_critic=True)
        data = {"values": batch.old_values, "returns": batch.returns, "loss_mask": batch.mask.float()}
        data |= {"input_ids": batch.mask.long(), "attention_mask": batch.mask.new_ones(batch.mask.shape)}
        context = SimpleNamespace(mb_input=data, ulysses_pad_size=0, pad_length=0)
        weight = lambda each: each["loss_mask"].count_nonzero()  # noqa: E731 as the critic has it
        with _logged() as stats, quiet():
            loss = engine._compute_logprobs_and_loss(
                batch.values,
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

    # Rollouts

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Run the RLVR workflow in groups, with the engine of the checks behind AReaL's interface."""
        from areal.api.cli_args import GenerationHyperparameters
        from areal.api.io_struct import ModelResponse
        from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
        from areal.workflow import rlvr

        request = Sampling(**sampling).with_ends(())
        if request.seed is not None or request.eos_token_ids is not None and len(request.eos_token_ids) > 1:
            raise NotProvided("AReaL has neither a seed of a request nor a setting for several EOS ids")
        config = GenerationHyperparameters(
            n_samples=request.n,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or int(1e8),
            stop=list(request.stop_sequences) or None,
        )
        responses: list[Any] = []

        async def agenerate(asked: Any) -> Any:
            given = asked.gconfig
            wanted = {
                "temperature": given.temperature,
                "top_p": given.top_p,
                "top_k": 0 if given.top_k >= int(1e8) else given.top_k,
                "max_new_tokens": given.max_new_tokens,
                "n": 1,
                "stop_sequences": tuple(given.stop or ()),
            }
            (completion,) = await engine.agenerate(list(asked.input_ids), wanted)
            if completion.logprobs is None or completion.sampled is not None:
                raise NotProvided("the engine returns logprobs, and samples all tokens of an answer")
            if completion.finish_reason == "abort":
                raise NotProvided("RemoteInfEngine goes on with aborted requests, which this adapter replaces")
            versions = completion.token_versions
            responses.append(
                ModelResponse(
                    input_tokens=list(asked.input_ids),
                    output_tokens=list(completion.token_ids),
                    output_logprobs=list(completion.logprobs),
                    output_versions=list(versions or [0] * len(completion.token_ids)),
                    stop_reason=completion.finish_reason,
                )
            )
            return responses[-1]

        async def scored(_: str, text: str, *__: Any, number: int, **___: Any) -> float:
            reward = items[number].reward(text)
            return float("nan") if reward is None else float(reward)

        async def generated() -> list[Any]:
            workflow = rlvr.RLVRWorkflow(
                lambda: 0.0,
                config,
                engine.tokenizer,
                get_input_ids_fn=lambda data, *_: list(items[data].prompt_ids),
                data_extract_prompt_fn=lambda data: data["number"],
            )
            workflow.async_reward_fn = scored
            grouped = GroupedRolloutWorkflow(workflow, request.n, SimpleNamespace(warning=lambda *_: None))
            server = SimpleNamespace(agenerate=agenerate)
            return await asyncio.gather(*(grouped.arun_episode(server, {"number": n}) for n in range(len(items))))

        with quiet():
            found = asyncio.run(generated())
        return [_group(item, data) for item, data in zip(items, found, strict=True)]

    def verify(self, answer: Answer) -> bool:
        from areal.reward.gsm8k import gsm8k_reward_fn

        if (answer.kind, answer.format) != ("number", "boxed"):
            raise NotProvided("gsm8k_reward_fn reads numbers in \\boxed{}")
        with quiet():
            return gsm8k_reward_fn(None, answer.text, None, None, answer.reference) == 1  # type: ignore[no-any-return]

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return self._loaded(n_items, epoch, rank, world_size)

    def _loaded(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        from areal.api.cli_args import TrainDatasetConfig
        from areal.utils.data import cycle_dataloader
        from areal.utils.dataloader import create_dataloader

        config = TrainDatasetConfig(path="", type="rl", batch_size=world_size, num_workers=0)
        loader = create_dataloader(list(range(n_items)), rank, world_size, config)
        found = cycle_dataloader(loader)
        own = len(loader)
        for _ in range(epoch * own):
            next(found)
        return [item for _ in range(own) for item in next(found)]

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        from areal.api.cli_args import ValidDatasetConfig
        from areal.utils.dataloader import create_dataloader

        config = ValidDatasetConfig(path="", type="rl", batch_size=batch_size * n_ranks, num_workers=0)
        return [item for batch in create_dataloader(list(range(n_items)), rank, n_ranks, config) for item in batch]

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


def _group(item: Item, data: Mapping[str, Any]) -> Group:
    completions = []
    prompt: list[int] = []
    for row in range(len(data["rewards"])):
        kept = data["attention_mask"][row]
        ids = data["input_ids"][row][kept].tolist()
        start = data["loss_mask"][row].tolist().index(1) if data["loss_mask"][row].any() else len(ids)
        prompt = ids[:start]
        completions.append(
            Completion(
                ids[start:],
                data["logprobs"][row][kept][start:].tolist(),
                token_versions=data["versions"][row][kept][start:].tolist(),
            )
        )
    versions = [version for each in completions for version in each.token_versions or ()]
    return Group(
        prompt, completions, data["rewards"].tolist(), item_id=item.id, policy_version=min(versions, default=0)
    )


def settings_for(settings: Mapping[str, Any], wanted: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return AReaL's settings for changed conventions; those that it has none for are left out."""
    names = {
        "discount": "discount",
        "clip_low": "eps_clip",
        "dual_clip": "c_clip",
        "kl_estimator": "kl_estimator",
        "kl_coef": "kl_ctl",
        "temperature": "temperature",
        "reward_clip": "reward_clip",
        "mini_batches": "ppo_n_minibatches",
        "value_clip": "critic_eps_clip",
        "ratio_level": "importance_sampling_level",
        "sapo_temperature_positive": "sapo_tau_pos",
        "sapo_temperature_negative": "sapo_tau_neg",
    }
    found: dict[str, Any] = {}
    for name in changes:
        value = getattr(wanted, name)
        match name:
            case "clip_low" | "value_clip" | "reward_clip" if value is None:
                raise NotProvided(f"AReaL's {names[name]} is a number")
            case "clip_high":
                found["eps_clip_higher"] = value
            case "kl_estimator" if value not in ("k1", "k2", "k3"):
                raise NotProvided("AReaL has the estimators k1, k2 and k3")
            case "objective":
                found["use_sapo_loss"] = value == "sapo"
            case "token_credit" | "gae_lambda":
                found["gae_lambda"] = wanted.gae_lambda if wanted.token_credit == "gae" else None
            case "advantage_baseline" | "advantage_scale" if wanted.advantage_scale == "batch":
                raise NotProvided("beside the mean of groups AReaL's batch deviation is that around these means")
            case "advantage_baseline" | "advantage_scale" if wanted.advantage_baseline == "leave_one_out" and (
                wanted.advantage_scale != "none"
            ):
                raise NotProvided("AReaL's deviation is that around the means of the others")
            case "advantage_baseline" | "advantage_scale" | "advantage_ddof":
                found["reward_norm"] = _norm(wanted)
            case "whitening":
                found["adv_norm"] = {} if value == "mean_std" else None
            case "overlong_buffer" | "overlong_penalty":
                found |= {
                    "overlong_reward_penalty": wanted.overlong_buffer is not None,
                    "overlong_tokens": wanted.overlong_buffer,
                    "overlong_penalty_factor": wanted.overlong_penalty,
                }
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                found |= _correction(wanted)
            case _ if name in names:
                found[names[name]] = value
    if found.get("gae_lambda", 0) is None:
        found.pop("gae_lambda")
    return found


def _norm(wanted: Conventions) -> dict[str, Any] | None:
    scale = None if wanted.advantage_scale == "none" else wanted.advantage_scale
    if wanted.advantage_baseline == "none" and scale is None:
        return None
    return {
        "mean_level": None if wanted.advantage_baseline == "none" else "group",
        "mean_leave1out": wanted.advantage_baseline == "leave_one_out",
        "std_level": scale,
        "std_unbiased": wanted.advantage_ddof == 1,
    }


def _correction(wanted: Conventions) -> dict[str, Any]:
    if wanted.importance_level != "token":
        if wanted.importance_level == "sequence":
            raise NotProvided("AReaL's weight of a sequence is the geometric mean of its tokens'")
        return {"use_decoupled_loss": False, "rejection_sampling": None}
    is_masked = wanted.importance_mode == "mask"
    return {
        "use_decoupled_loss": True,
        "rejection_sampling": {
            "level": "token",
            "action": "mask" if is_masked else "clamp",
            "metric": "ratio",
            "upper": wanted.importance_high,
            "lower": wanted.importance_low or None,
        },
    }
