"""TRL's GRPOTrainer as an adapter: a real trainer on a tiny model, whose own methods are called.

TRL computes advantages, masks and losses inside private methods of the trainer, so this adapter drives those methods with
given rewards, tokens and logprobs instead of retyping their formulas. Written for TRL 1.16.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import kl_of_each_token, micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Aggregation, Conventions, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch
    from rlcanary.contract.records.lengths import Lengths

AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
}
# Loss types that have an objective of their own, and its name.
OBJECTIVES: dict[str, Objective] = {"cispo": "cispo", "sapo": "sapo"}
METRICS = {"kl": "kl", "entropy": "entropy", "clip_ratio/region_mean": "clip_fraction"}


class TrlAdapter(Adapter):
    """Adapter of TRL's trainer under some `GRPOConfig` settings, by default TRL's."""

    name = "trl"

    def __init__(self, **settings: Any) -> None:
        with usable("trl", "pip install 'rlcanary[trl]'", "TRL 1.16", at_least="1.16"), quiet():
            import trl.trainer.grpo_trainer  # noqa: F401
        # The trainer is built without its engine: the correction by the engine's logprobs is switched on afterwards.
        self.use_vllm = bool(settings.pop("use_vllm", False))
        # The soft punishment is a reward function beside the others, no setting.
        self.overlong_buffer = settings.pop("overlong_buffer", None)
        self.settings = settings

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of(self._trainer.args, self.use_vllm).replace(overlong_buffer=self.overlong_buffer)

    def configured(self, **changes: Any) -> Self:
        settings = {**self.settings, "use_vllm": self.use_vllm, "overlong_buffer": self.overlong_buffer}
        return type(self)(**_settings(settings, self.conventions, changes))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        from trl.trainer.utils import selective_log_softmax

        return selective_log_softmax(logits, token_ids, temperature=temperature)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch
        from trl.trainer.utils import add_fused_lm_head, pad

        patched = copy.deepcopy(model)
        add_fused_lm_head(patched, temperature=temperature, outputs=("log_probs", "entropy"))
        prompts = prompts_of(batch)
        prompt_ids = pad(prompts, padding_value=0, padding_side="left")
        prompt_mask = pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left")
        logprobs, _, _ = self._trainer._get_per_token_logps_and_entropies(
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
        trainer.eos_token_ids = list(eos_token_ids)
        trainer._tokenizer.pad_token_id = pad_token_id
        prompts = [[5]] * len(completion_ids)
        # The trainer cuts generated ids at the first EOS; the rows' lengths are its completion mask.
        trainer.model.generate = lambda input_ids, **_: torch.cat([input_ids, completion_ids], dim=1)
        completions, _ = trainer._generate_single_turn(prompts, None, {}, 1)
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
        import torch

        _, counts = torch.unique_consecutive(group_ids, return_counts=True)
        if len(counts) != len(group_ids.unique()) or len(counts.unique()) != 1:
            raise NotProvided("groups have to be of equal size and in order")
        if counts[0] < 2:
            raise NotProvided("num_generations has to be at least 2")
        trainer = self._trainer
        trainer.num_generations = int(counts[0])
        trainer.model.train()
        items = [{"prompt": "t5", "given_reward": float(reward)} for reward in rewards]
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
        """Return the weights that the trainer computes from vLLM's logprobs and its own when it scores completions."""
        import torch

        trainer, rows = self._trainer, len(mask)
        if self.conventions.importance_level == "none":
            raise NotProvided("this configuration does not correct for vLLM's logprobs")
        trainer.num_generations = rows
        trainer.model.train()
        # No request is sent to an engine.
        trainer._last_loaded_step = trainer.state.global_step
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (trainer_logprobs, None, None)
        trainer.rollout_func = lambda *_: {
            "prompt_ids": [[5]] * rows,
            "completion_ids": [[6] * mask.shape[1]] * rows,
            "logprobs": sampler_logprobs.tolist(),
            "env_mask": mask.long().tolist(),
        }
        scored = trainer._generate_and_score_completions([{"prompt": "t5", "given_reward": 0.0}] * rows)
        weights = scored["importance_sampling_ratio"].expand(mask.shape)
        return torch.where(mask, weights, 0.0)

    def _loss_of_pieces(self, pieces: list[PolicyBatch], whole: PolicyBatch) -> LossOutput:
        import torch

        if whole.global_tokens is not None or whole.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        trainer = self._trainer
        trainer.model.train()
        trainer._metrics["train"].clear()
        trainer.current_gradient_accumulation_steps = len(pieces)
        trainer.args.steps_per_generation = len(pieces)
        losses = []
        for piece in pieces:
            # The model's forward pass is replaced by the given logprobs and entropies; the rest is the trainer's.
            entropy = torch.zeros_like(piece.logprobs) if piece.entropy is None else piece.entropy
            scored = (piece.logprobs, entropy, None)
            trainer._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: scored
            inputs = _loss_inputs(piece, whole.mask.sum())
            if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
                if piece.sampler_logprobs is None:
                    raise NotProvided("the correction needs the sampler's logprobs")
                inputs["importance_sampling_ratio"] = self.importance_weights(
                    piece.old_logprobs, piece.sampler_logprobs, piece.mask
                )
            losses.append(trainer._compute_loss(trainer.model, inputs))
        logged = trainer._metrics["train"]
        metrics = {ours: logged[theirs][0] for theirs, ours in METRICS.items() if len(logged[theirs]) == 1}
        if whole.entropy is None:
            metrics.pop("entropy", None)
        return LossOutput(torch.stack(losses).sum(), metrics)

    @property
    def _trainer(self) -> Any:
        """Return a trainer in the state in which its constructor left it."""
        trainer = copy.copy(self._built_trainer)
        trainer.args = copy.copy(trainer.args)
        trainer.model = copy.copy(trainer.model)
        trainer.model_wrapped = trainer.model
        trainer._tokenizer = copy.copy(trainer._tokenizer)
        trainer.use_vllm = self.use_vllm
        return trainer

    @cached_property
    def _built_trainer(self) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from rlcanary.tiny_models import tiny_llama, tiny_tokenizer

        def sample(prompts: list[str], _trainer: Any) -> dict[str, Any]:
            return {"prompt_ids": [[5]] * len(prompts), "completion_ids": [[6]] * len(prompts), "logprobs": None}

        def given(given_reward: list[float], **_: Any) -> list[float]:
            return given_reward

        with tempfile.TemporaryDirectory() as folder, quiet():
            # The trainer reads its reference model from the folder that the model came from.
            model = tiny_llama()
            model.save_pretrained(folder)
            model.config._name_or_path = folder
            settings = {"max_completion_length": 16, **self.settings}
            return GRPOTrainer(
                model=model,
                reward_funcs=given,
                rollout_func=sample,
                processing_class=tiny_tokenizer(),
                train_dataset=Dataset.from_dict({"prompt": ["t5"]}),
                args=GRPOConfig(
                    output_dir=str(Path(folder, "run")),
                    use_cpu=True,
                    bf16=False,
                    report_to=[],
                    num_generations=2,
                    per_device_train_batch_size=2,
                    **settings,
                ),
            )


def conventions_of(args: Any, uses_vllm: bool) -> Conventions:
    """Translate a `GRPOConfig` into conventions; `uses_vllm` tells whether an engine other than the trainer samples."""
    objective = OBJECTIVES.get(args.loss_type, "clip")
    level, mode = args.vllm_importance_sampling_mode.split("_")
    is_corrected = uses_vllm and args.vllm_importance_sampling_correction
    return Conventions(
        advantage_scale=args.scale_rewards,
        advantage_ddof=1,
        advantage_eps=1e-4,
        advantage_eps_mode="add",
        nan_reward="exclude",
        objective=objective,
        sapo_temperature_positive=args.sapo_temperature_pos,
        sapo_temperature_negative=args.sapo_temperature_neg,
        off_policy_mask=args.off_policy_mask_threshold,
        ratio_level=args.importance_sampling_level,
        clip_low=args.epsilon if objective == "clip" else None,
        clip_high=(args.epsilon_high or args.epsilon) - (objective == "cispo"),
        dual_clip=args.delta,
        aggregation=AGGREGATIONS[args.loss_type],
        aggregation_constant=args.max_completion_length,
        top_entropy=None if args.top_entropy_quantile == 1 else args.top_entropy_quantile,
        entropy_aggregation="token_mean",
        kl_estimator="k3",
        kl_coef=args.beta,
        kl_ratio_weighted=args.use_bias_correction_kl,
        entropy_coef=args.entropy_coef,
        logprobs_upcast=False,
        importance_level=level if is_corrected else "none",
        importance_mode=mode,
        importance_low=args.vllm_importance_sampling_clip_min or 0.0,
        importance_high=_or_infinite(args.vllm_importance_sampling_clip_max),
    )


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


def _or_infinite(bound: float | None) -> float:
    return float("inf") if bound is None else bound


@cache
def _with_beta_one() -> TrlAdapter:
    return TrlAdapter(beta=1.0, loss_type="grpo", use_bias_correction_kl=False)


def _settings(settings: dict[str, Any], conventions: Conventions, changes: dict[str, Any]) -> dict[str, Any]:
    """Return GRPOConfig settings for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of TRL.
    """
    wanted = conventions.replace(**changes)
    result = dict(settings)
    for name in changes:
        match name:
            case "overlong_buffer":
                result["overlong_buffer"] = wanted.overlong_buffer
            case "kl_coef":
                result["beta"] = wanted.kl_coef
            case "advantage_scale":
                result["scale_rewards"] = wanted.advantage_scale
            case "ratio_level":
                result["importance_sampling_level"] = wanted.ratio_level
            case "kl_ratio_weighted":
                result["use_bias_correction_kl"] = wanted.kl_ratio_weighted
            case "dual_clip":
                result["delta"] = wanted.dual_clip
            case "sapo_temperature_positive":
                result["sapo_temperature_pos"] = wanted.sapo_temperature_positive
            case "sapo_temperature_negative":
                result["sapo_temperature_neg"] = wanted.sapo_temperature_negative
            case "off_policy_mask":
                result["off_policy_mask_threshold"] = wanted.off_policy_mask
            case "objective" | "aggregation" if (wanted.objective, wanted.aggregation) == ("sapo", "sequence_mean"):
                result["loss_type"] = "sapo"
            case "entropy_coef" if wanted.aggregation == "token_mean" or wanted.entropy_aggregation == "token_mean":
                result["entropy_coef"] = wanted.entropy_coef
            case "entropy_aggregation" if wanted.entropy_aggregation == "token_mean":
                pass  # It is so under every loss.
            case "top_entropy":
                result["top_entropy_quantile"] = 1.0 if wanted.top_entropy is None else wanted.top_entropy
            case "clip_low" if wanted.clip_low is not None:
                result["epsilon"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None and wanted.objective == "clip":
                result["epsilon_high"] = wanted.clip_high
            case "aggregation_constant":
                result["max_completion_length"] = int(wanted.aggregation_constant)
            case "aggregation" if wanted.aggregation in AGGREGATIONS.values() and wanted.objective == "clip":
                result["loss_type"] = {
                    ours: theirs for theirs, ours in AGGREGATIONS.items() if theirs not in OBJECTIVES
                }[wanted.aggregation]
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                level = "token" if wanted.importance_level == "none" else wanted.importance_level
                result |= {
                    "use_vllm": wanted.importance_level != "none",
                    "vllm_importance_sampling_mode": f"{level}_{wanted.importance_mode}",
                    "vllm_importance_sampling_clip_max": wanted.importance_high,
                    "vllm_importance_sampling_clip_min": wanted.importance_low or None,
                }
                # TRL's truncation also has a lower bound, which the conventions cannot express.
                if wanted.importance_mode == "truncate":
                    result["vllm_importance_sampling_clip_min"] = None
            case _:
                raise NotProvided(f"this adapter has no setting of TRL for {name}={changes[name]!r}")
    return result
