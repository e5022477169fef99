"""NeMo RL's loss and advantage estimator as an adapter. Written for NeMo RL of August 2026."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import kl_of_each_token, micro_batches
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.nemo_rl_losses import OtherLosses, scored
from rlcanary.adapters.stubs import absent, newer_typed_dicts
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit
from rlcanary.errors import UserError

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
# Settings that change the loss in ways that the conventions cannot express.
WITHOUT_WORDS = (
    "disable_ppo_ratio",
    "force_on_policy_ratio",
    "use_on_policy_kl_approximation",
    "positive_example_nll_weight",
)

# Loggers and watchers, none of which the checks call.
SERVICES = ("mlflow", "swanlab", "wandb", "nvidia_resiliency_ext")


class NemoRlAdapter(OtherLosses):
    """Adapter of NeMo RL under some settings, by default its own."""

    name = "nemo_rl"

    def __init__(self, loss: Mapping[str, Any] | None = None, advantage: Mapping[str, Any] | None = None) -> None:
        """Set up the adapter with settings of NeMo RL's configuration classes.

        Args:
            loss: fields of `ClippedPGLossConfig`.
            advantage: fields of `AdvEstimatorConfig` for its estimator `grpo`.

        Raises:
            UserError: NeMo RL is not installed, or the conventions cannot express a setting.
        """
        self.loss = dict(loss or {})
        self.advantage = dict(advantage or {})
        install = "run this in the environment in which NeMo RL trains, with rlcanary installed there"
        with (
            usable("nemo_rl", install, "NeMo RL of August 2026"),
            absent(*SERVICES),
            newer_typed_dicts(),
            quiet(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            import nemo_rl.algorithms.advantage_estimator
            import nemo_rl.algorithms.loss  # noqa: F401

            # Configurations were dictionaries in older trees.
            conventions_of(self._loss_config, self._advantage_config)
        unknown = [name for name in WITHOUT_WORDS if self.loss.get(name)]
        if self._loss_config.truncated_importance_sampling_type == "seq-mask-tis":
            unknown.append("truncated_importance_sampling_type='seq-mask-tis'")
        if unknown:
            raise UserError(f"the conventions cannot express {', '.join(unknown)}")

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of(self._loss_config, self._advantage_config)

    def configured(self, **changes: Any) -> Self:
        return type(self)(*settings_for(self.loss, self.advantage, self.conventions, changes))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch

        if temperature != 1.0:
            raise NotProvided("the policy worker scales the logits before it scores them")
        return scored(torch.nn.functional.pad(logits, (0, 0, 0, 1)), torch.nn.functional.pad(token_ids, (1, 0)))

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return self._estimated(rewards, group_ids, rewards.new_ones(len(rewards), 1)).squeeze(1)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is not None:
            raise NotProvided("the estimator of GRPO has no rewards of tokens")
        return Credit(self._estimated(batch.rewards, batch.group_ids, batch.mask.float()))

    def _estimated(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator

        estimator = GRPOAdvantageEstimator(self._advantage_config, self._loss_config)
        found: Tensor = estimator.compute_advantage(prompt_ids=group_ids.unsqueeze(1), rewards=rewards, mask=mask)
        return found

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        loss, metrics = self._call(batch, batch)
        return LossOutput(loss, self._metrics(metrics, batch))

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

        with absent(*SERVICES, "soundfile"), newer_typed_dicts():
            from nemo_rl.algorithms.grpo import dynamic_sampling
        from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        baseline, std = calculate_baseline_and_std_per_prompt(
            torch.zeros(len(rewards), 1),
            rewards,
            torch.ones_like(rewards),
            leave_one_out_baseline=self._advantage_config.use_leave_one_out_baseline,
        )
        grpo = SimpleNamespace(
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
        loss, metrics = ClippedPGLossFn(self._loss_config)(
            next_token_logprobs=piece.logprobs,
            data=BatchedDataDict(data),
            global_valid_seqs=torch.tensor(float(len(whole.mask))),
            global_valid_toks=whole.mask.sum().float(),
        )
        return loss, metrics

    def _metrics(self, logged: Mapping[str, float], batch: PolicyBatch) -> dict[str, float]:
        names = dict(METRICS)
        if not self.conventions.kl_coef or self.conventions.aggregation != "token_mean":
            del names["kl_penalty"]
        if batch.sampler_logprobs is None:
            del names["token_mult_prob_error"]
        return {ours: float(logged[theirs]) for theirs, ours in names.items()}

    @cached_property
    def _loss_config(self) -> Any:
        from nemo_rl.algorithms.loss import ClippedPGLossConfig

        return ClippedPGLossConfig(**self.loss)

    @cached_property
    def _advantage_config(self) -> Any:
        from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig

        return AdvEstimatorConfig(**self.advantage)


def conventions_of(loss: Any, advantage: Any) -> Conventions:
    """Translate a `ClippedPGLossConfig` and an `AdvEstimatorConfig` into conventions."""
    level, mode, low, high = "none", "truncate", 0.0, float("inf")
    if loss.use_importance_sampling_correction:
        level = "sequence" if loss.sequence_level_importance_ratios else "token"
        mode = "mask" if loss.truncated_importance_sampling_type == "icepop" else "truncate"
        low = loss.truncated_importance_sampling_ratio_min or 0.0
        high = loss.truncated_importance_sampling_ratio or float("inf")
    is_in_reward = loss.use_kl_in_reward
    return Conventions(
        advantage_baseline="leave_one_out" if advantage.use_leave_one_out_baseline else "mean",
        advantage_scale="group" if advantage.normalize_rewards else "none",
        advantage_ddof=1,
        advantage_eps=1e-6,
        advantage_eps_mode="skip",
        singleton_group="zero",
        objective="cispo" if loss.use_cispo else "clip",
        ratio_level="sequence" if loss.sequence_level_importance_ratios else "token",
        clip_low=loss.ratio_clip_min,
        clip_high=loss.ratio_clip_max,
        dual_clip=loss.ratio_clip_c,
        aggregation="token_mean" if loss.token_level_loss else "sequence_mean",
        kl_estimator=loss.reference_policy_kl_type,
        kl_coef=loss.reference_policy_kl_penalty,
        kl_placement="reward" if is_in_reward else "loss",
        kl_input_clamp=loss.kl_input_clamp_value,
        kl_output_clamp=loss.kl_output_clamp_value,
        kl_score_term=True,
        importance_level=level,  # type: ignore[arg-type]
        importance_mode=mode,
        importance_low=low,
        importance_high=high,
        # The defaults of `MseValueLossConfig` and `DPOLossConfig`.
        value_coef=0.5,
        preference_beta=0.05,
    )


def settings_for(
    loss: Mapping[str, Any], advantage: Mapping[str, Any], conventions: Conventions, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of the two configuration classes for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of NeMo RL.
    """
    wanted = conventions.replace(**changes)
    loss, advantage = dict(loss), dict(advantage)
    for name in changes:
        match name:
            case "advantage_baseline" if wanted.advantage_baseline != "none":
                advantage["use_leave_one_out_baseline"] = wanted.advantage_baseline == "leave_one_out"
            case "advantage_scale" if wanted.advantage_scale != "batch":
                advantage["normalize_rewards"] = wanted.advantage_scale == "group"
            case "objective" if wanted.objective in ("clip", "cispo"):
                loss["use_cispo"] = wanted.objective == "cispo"
            case "ratio_level":
                loss["sequence_level_importance_ratios"] = wanted.ratio_level == "sequence"
            case "clip_low" if wanted.clip_low is not None:
                loss["ratio_clip_min"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None:
                loss["ratio_clip_max"] = wanted.clip_high
            case "dual_clip":
                loss["ratio_clip_c"] = wanted.dual_clip
            case "aggregation" if wanted.aggregation in ("token_mean", "sequence_mean"):
                loss["token_level_loss"] = wanted.aggregation == "token_mean"
            case "kl_estimator" if wanted.kl_estimator != "abs":
                loss["reference_policy_kl_type"] = wanted.kl_estimator
            case "kl_coef":
                loss["reference_policy_kl_penalty"] = wanted.kl_coef
            case "kl_placement":
                loss["use_kl_in_reward"] = wanted.kl_placement == "reward"
            case "kl_input_clamp":
                loss["kl_input_clamp_value"] = wanted.kl_input_clamp
            case "kl_output_clamp":
                loss["kl_output_clamp_value"] = wanted.kl_output_clamp
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                loss |= _correction_for(wanted)
            case _:
                raise NotProvided(f"this adapter has no setting of NeMo RL for {name}={changes[name]!r}")
    if wanted.ratio_level == "sequence" and wanted.aggregation != "sequence_mean":
        raise NotProvided("sequence_level_importance_ratios excludes token_level_loss")
    if wanted.objective == "cispo" and (wanted.aggregation != "token_mean" or wanted.dual_clip is not None):
        raise NotProvided("use_cispo needs token_level_loss and excludes ratio_clip_c")
    return loss, advantage


def _correction_for(wanted: Conventions) -> dict[str, Any]:
    if wanted.importance_level == "none":
        return {"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None}
    if wanted.importance_level != wanted.ratio_level:
        raise NotProvided("the correction is at the level of the importance ratio")
    is_mask = wanted.importance_mode == "mask"
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop" if is_mask else "tis",
        "truncated_importance_sampling_ratio": wanted.importance_high,
        "truncated_importance_sampling_ratio_min": wanted.importance_low if is_mask else None,
    }
