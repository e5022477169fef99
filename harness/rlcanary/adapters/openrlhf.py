"""OpenRLHF's actor and experience maker as an adapter: their own methods on objects without Ray, DeepSpeed or a GPU.

Written for OpenRLHF of mid-2026, whose options have dotted names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.stubs import KERNELS, absent, stubbed
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Aggregation, Baseline, Conventions, Scale
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch

# The defaults of openrlhf/cli/train_ppo_ray.py, whose parser cannot be imported; the advantage
# estimator is the one of GRPO.
DEFAULTS: dict[str, Any] = {
    "actor.eps_clip_low_high": (0.2, 0.2),
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.entropy_coef": None,
    "actor.aux_loss_coef": 0.0,
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.advantage.estimator": "group_norm",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": (0.5, 5.0),
    "algo.advantage.is_correction_type": "tis",
    "reward.clip_range": (-10.0, 10.0),
    "reward.overlong_buffer_len": None,
    "reward.stop_properly_penalty_coef": None,
    "train.dynamic_batch_enable": False,
}
ESTIMATORS: dict[str, tuple[Baseline, Scale]] = {
    "group_norm": ("mean", "group"),
    "dr_grpo": ("mean", "none"),
    "rloo": ("leave_one_out", "none"),
}
METRICS = {"ppo_clip_ratio": "clip_fraction", "kl": "kl", "entropy_loss": "entropy"}


class OpenrlhfAdapter(Adapter):
    """Adapter of OpenRLHF under some settings, by default its own with the advantage estimator `group_norm`."""

    name = "openrlhf"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import OpenRLHF and check its settings.

        Args:
            settings: options of `openrlhf.cli.train_ppo_ray`, such as `{"actor.dual_clip": 3.0}`.

        Raises:
            UserError: OpenRLHF is not installed, or the conventions cannot express a setting.
        """
        install = "pip install openrlhf, beside rlcanary"
        with usable("openrlhf", install, "OpenRLHF of mid-2026"), stubbed(KERNELS), absent("deepspeed"), quiet():
            import openrlhf.trainer.ppo_utils.experience_maker
            import openrlhf.trainer.ray.ppo_actor  # noqa: F401
        self.settings = dict(settings or {})
        check_settings({**DEFAULTS, **self.settings})

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of({**DEFAULTS, **self.settings})

    def configured(self, **changes: Any) -> Self:
        return type(self)(settings_for(self.settings, self.conventions, changes))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch
        from openrlhf.models.utils import log_probs_from_logits

        # In float32, like the actor. A model's output is no leaf, which matters to an operation in place.
        logits = logits.clone() if logits.requires_grad else logits
        return log_probs_from_logits(logits.to(torch.float32), token_ids, temperature)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch
        from openrlhf.models import Actor

        prompts = prompts_of(batch)
        width = max(map(len, prompts))
        prompt_ids = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in prompts])
        lengths = torch.tensor([len(ids) for ids in prompts])
        prompt_mask = torch.arange(width).flip(0) < lengths.unsqueeze(1)
        actor = Actor(model, temperature=temperature)
        actor.packing_samples = False
        return actor(  # type: ignore[no-any-return]
            torch.cat([prompt_ids, batch.completion_ids], dim=1),
            batch.completion_mask,
            attention_mask=torch.cat([prompt_mask, tokens_of_completions(batch)], dim=1).long(),
        )

    def entropy(self, logits: Tensor) -> Tensor:
        import torch
        from openrlhf.models.utils import compute_entropy

        with torch.compiler.set_stance("force_eager"):
            return compute_entropy(logits)  # type: ignore[no-any-return]

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch
        from openrlhf.trainer.ppo_utils.experience import Experience
        from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

        _, counts = torch.unique(group_ids, return_counts=True)
        if len(counts.unique()) != 1:
            raise NotProvided("n_samples_per_prompt is one size for all groups")
        rows = len(rewards)
        # Each row's position before the samples were spread over the ranks: with its group.
        places = torch.argsort(torch.argsort(group_ids, stable=True))
        experience = Experience(
            index=places.tolist(),
            rewards=rewards.clone(),
            action_mask=torch.ones(rows, 1, dtype=torch.bool),
            kl=torch.zeros(rows, 1),
            response_length=torch.ones(rows),
            info={},
        )
        maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
        maker.strategy = SimpleNamespace(args=self._args({"rollout.n_samples_per_prompt": int(counts[0])}))
        maker.args = maker.strategy.args
        maker.advantage_estimator = maker.args.algo.advantage.estimator
        maker.kl_ctl = SimpleNamespace(value=0.0)
        with quiet():
            (made,) = maker.compute_advantages_and_returns([experience])
        return made.advantages.squeeze(1)  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch, 1)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from openrlhf.models.utils import compute_approx_kl

        return compute_approx_kl(logprobs, ref_logprobs, self.conventions.kl_estimator)  # type: ignore[no-any-return]

    def _update(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Run the actor's training step on every micro-batch of one optimizer step."""
        import torch
        from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        pieces = micro_batches(batch, n_micro)
        losses: list[Tensor] = []
        trainer = self._trainer(losses)
        metrics: dict[str, Any] = {}
        windows = iter_grad_accum_global_norm(pieces, trainer.strategy, n_micro, lambda piece: piece.mask)
        for step, (piece, loss_batch_info) in enumerate(windows):
            trainer.actor = _GivenActor(piece)
            # With its coefficient at zero the trainer computes the KL of nothing; it needs no reference then.
            status = trainer.training_step(self._experience(piece), self.conventions.kl_coef, step, loss_batch_info)
            metrics = status["metrics"]
        # DeepSpeed divides the loss of every backward pass by the number of them in an optimizer step.
        total = torch.stack(losses).sum() / n_micro
        if n_micro > 1:
            return LossOutput(total)
        kept = dict(METRICS)
        if self.conventions.dual_clip is not None:
            del kept["ppo_clip_ratio"]
        if self.conventions.aggregation != "token_mean":
            kept.pop("entropy_loss")
        return LossOutput(total, {ours: float(metrics[theirs]) for theirs, ours in kept.items() if theirs in metrics})

    def _experience(self, batch: PolicyBatch) -> Any:
        import torch
        from openrlhf.trainer.ppo_utils.experience import Experience

        rows, width = batch.mask.shape
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        conventions = self.conventions
        if conventions.kl_coef and conventions.kl_placement == "loss" and batch.ref_logprobs is None:
            raise NotProvided("kl.use_loss needs reference logprobs")
        if conventions.importance_level != "none" and batch.sampler_logprobs is None:
            raise NotProvided("is_correction_enable needs the sampler's logprobs")
        return Experience(
            sequences=torch.zeros(rows, 1 + width, dtype=torch.long),
            attention_mask=torch.ones(rows, 1 + width, dtype=torch.long),
            action_mask=batch.mask,
            action_log_probs=batch.old_logprobs,
            base_action_log_probs=batch.ref_logprobs,
            rollout_log_probs=batch.sampler_logprobs,
            advantages=advantages.expand(rows, width),
            info={},
        )

    def _trainer(self, losses: list[Tensor]) -> Any:
        from openrlhf.models import PolicyLoss
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

        args = self._args({})
        trainer = ActorPPOTrainer.__new__(ActorPPOTrainer)
        trainer.args = args
        trainer.strategy = SimpleNamespace(
            args=args,
            ring_attn_group=None,
            backward=lambda loss, *_: losses.append(loss),
            optimizer_step=lambda *_, **__: None,
            get_grad_norm=lambda _: 0.0,
        )
        trainer.actor_optim = None
        trainer.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
        trainer.ema_model = None
        trainer.replay_buffer = None
        trainer.aux_loss = False
        correction = args.algo.advantage
        trainer.actor_loss_fn = PolicyLoss(
            clip_eps_low=args.actor.eps_clip_low_high[0],
            clip_eps_high=args.actor.eps_clip_low_high[1],
            dual_clip=args.actor.dual_clip,
            policy_loss_type=args.actor.policy_loss_type,
            enable_vllm_is_correction=correction.is_correction_enable,
            vllm_is_truncated_threshold=correction.is_correction_threshold,
            vllm_is_correction_type=correction.is_correction_type,
        )
        return trainer

    def _args(self, more: Mapping[str, Any]) -> Any:
        """Return the parsed options as OpenRLHF nests them: `args.algo.kl.estimator`."""
        args = SimpleNamespace()
        for name, value in {**DEFAULTS, **self.settings, **more}.items():
            *groups, option = name.split(".")
            place = args
            for group in groups:
                if not hasattr(place, group):
                    setattr(place, group, SimpleNamespace())
                place = getattr(place, group)
            setattr(place, option, value)
        return args


class _GivenActor:
    """Stand-in for the policy that returns the logprobs and entropies of a batch."""

    def __init__(self, batch: PolicyBatch) -> None:
        self.batch = batch

    def train(self) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> tuple[Tensor, Any]:
        return self.batch.logprobs, SimpleNamespace(entropy=self.batch.entropy)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that the conventions cannot express.

    Raises:
        UserError: the conventions cannot express a setting.
    """
    estimator = settings["algo.advantage.estimator"]
    if estimator not in ESTIMATORS:
        raise UserError(f"algo.advantage.estimator={estimator!r}: this adapter knows {', '.join(ESTIMATORS)}")
    correction = settings["algo.advantage.is_correction_type"]
    if settings["algo.advantage.is_correction_enable"]:
        if correction == "seq-mask-tis":
            raise UserError("the conventions cannot express is_correction_type='seq-mask-tis'")
        if correction == "tis" and settings["algo.advantage.is_correction_threshold"][0] > 0:
            raise UserError("the conventions cannot express a lower threshold of 'tis': set it to 0")
        if settings["actor.policy_loss_type"] == "gspo":
            raise UserError("the conventions cannot express 'gspo' with is_correction_enable")


def conventions_of(settings: Mapping[str, Any]) -> Conventions:
    """Translate OpenRLHF's options into conventions."""
    baseline, scale = ESTIMATORS[settings["algo.advantage.estimator"]]
    is_sequence = settings["actor.policy_loss_type"] == "gspo"
    aggregation: Aggregation = "sequence_mean_nonempty" if is_sequence else "token_mean"
    clip_low, clip_high = settings["actor.eps_clip_low_high"]
    low, high = settings["algo.advantage.is_correction_threshold"]
    return Conventions(
        advantage_baseline=baseline,
        advantage_scale=scale,
        advantage_ddof=1,
        advantage_eps=1e-9,
        advantage_eps_mode="add",
        singleton_group="nan",
        ratio_level="sequence" if is_sequence else "token",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=settings["actor.dual_clip"],
        log_ratio_clamp=None if is_sequence else 20.0,
        aggregation=aggregation,
        kl_estimator=settings["algo.kl.estimator"],
        kl_coef=settings["algo.kl.init_coef"],
        kl_placement="loss" if settings["algo.kl.use_loss"] else "reward",
        kl_output_clamp=10.0,
        entropy_coef=settings["actor.entropy_coef"] or 0.0,
        importance_level="token" if settings["algo.advantage.is_correction_enable"] else "none",
        importance_mode="mask" if settings["algo.advantage.is_correction_type"] == "icepop" else "truncate",
        importance_low=low,
        importance_high=high,
    )


def settings_for(settings: Mapping[str, Any], conventions: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenRLHF's options for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of OpenRLHF.
    """
    wanted = conventions.replace(**changes)
    result = dict(settings)
    estimators = {ours: theirs for theirs, ours in ESTIMATORS.items()}
    advantage = (wanted.advantage_baseline, wanted.advantage_scale)
    for name in changes:
        match name:
            case "advantage_baseline" | "advantage_scale" if advantage in estimators:
                result["algo.advantage.estimator"] = estimators[advantage]
            case "ratio_level" | "aggregation" if (wanted.ratio_level, wanted.aggregation) == ("token", "token_mean"):
                result["actor.policy_loss_type"] = "ppo"
            case "ratio_level" | "aggregation" if (wanted.ratio_level, wanted.aggregation) == (
                "sequence",
                "sequence_mean_nonempty",
            ):
                result["actor.policy_loss_type"] = "gspo"
            case "clip_low" | "clip_high" if wanted.clip_low is not None and wanted.clip_high is not None:
                result["actor.eps_clip_low_high"] = (wanted.clip_low, wanted.clip_high)
            case "dual_clip":
                result["actor.dual_clip"] = wanted.dual_clip
            case "kl_estimator" if wanted.kl_estimator != "abs":
                result["algo.kl.estimator"] = wanted.kl_estimator
            case "kl_coef":
                result["algo.kl.init_coef"] = wanted.kl_coef
            case "kl_placement":
                result["algo.kl.use_loss"] = wanted.kl_placement == "loss"
            case "entropy_coef":
                result["actor.entropy_coef"] = wanted.entropy_coef
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                if wanted.importance_level == "sequence":
                    raise NotProvided("this adapter has no setting of OpenRLHF for importance_level='sequence'")
                is_mask = wanted.importance_mode == "mask"
                result |= {
                    "algo.advantage.is_correction_enable": wanted.importance_level == "token",
                    "algo.advantage.is_correction_type": "icepop" if is_mask else "tis",
                    "algo.advantage.is_correction_threshold": (
                        wanted.importance_low if is_mask else 0.0,
                        wanted.importance_high,
                    ),
                }
            case _:
                raise NotProvided(f"this adapter has no setting of OpenRLHF for {name}={changes[name]!r}")
    return result
