"""verl's actor update as an adapter: its engine's forward-backward loop, its loss and its advantage estimators.

The engine is the FSDP one without FSDP: its methods run as they are on one process and on the CPU, with a given model, or
with given logprobs in place of a model's output. Written for verl 0.9.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.base import Adapter, NotProvided
from rlcanary.batch import LossOutput
from rlcanary.conventions import Aggregation, Conventions, KlEstimator
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.batch import CollatedBatch, PolicyBatch

# The trainer divides sequence losses by ppo_mini_batch_size, so rows without a trained token count.
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
KL_ESTIMATORS: dict[str, KlEstimator] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "abs": "abs",
}
LOSS_MODES = ("vanilla", "gspo", "cispo")


class VerlAdapter(Adapter):
    """verl under some settings; without any, under its defaults with the GRPO advantage estimator."""

    name = "verl"

    def __init__(self, actor: Mapping[str, Any] | None = None, algorithm: Mapping[str, Any] | None = None) -> None:
        """Settings of verl's configuration groups.

        Args:
            actor: fields of `ActorConfig`; `policy_loss` and others that are groups themselves as mappings.
            algorithm: fields of `AlgoConfig`; `rollout_correction` as a mapping.

        Raises:
            UserError: verl is not installed, or a setting is one that the conventions have no words for.
        """
        try:
            with _quiet():
                import verl.trainer.ppo.ray_trainer
                import verl.workers.engine.fsdp.transformer_impl
                import verl.workers.utils.losses  # noqa: F401
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is not installed: pip install 'rlcanary[verl]'") from error
        self.actor = dict(actor or {})
        self.algorithm = {"adv_estimator": "grpo", **(algorithm or {})}
        loss_mode, aggregation = self._actor_config.policy_loss.loss_mode, self._actor_config.loss_agg_mode
        if loss_mode not in LOSS_MODES:
            raise UserError(f"policy_loss.loss_mode={loss_mode!r}: this adapter knows {', '.join(LOSS_MODES)}")
        if aggregation not in AGGREGATIONS:
            raise UserError(f"loss_agg_mode={aggregation!r}: this adapter knows {', '.join(AGGREGATIONS)}")
        if aggregation == "seq-mean-token-sum-norm" and self._actor_config.loss_scale_factor is None:
            raise UserError(
                "without a loss_scale_factor 'seq-mean-token-sum-norm' divides by the width of the padded batch, "
                "so that the loss depends on the longest completion: set one"
            )

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """What the settings say, in our words."""
        actor, algorithm = self._actor_config, self._algorithm_config
        loss_mode = actor.policy_loss.loss_mode
        estimator = KL_ESTIMATORS[actor.kl_loss_type]
        correction = algorithm.rollout_correction
        level = correction.rollout_is if correction is not None else None
        low, high = _weight_bounds(correction.rollout_is_threshold) if level is not None else (None, 2.0)
        is_rloo = algorithm.adv_estimator == "rloo"
        return Conventions(
            advantage_baseline="leave_one_out" if is_rloo else "mean",
            advantage_scale="group" if algorithm.norm_adv_by_std_in_grpo and not is_rloo else "none",
            advantage_ddof=1,
            advantage_eps=1e-6,
            advantage_eps_mode="add",
            singleton_group="reward",
            objective="cispo" if loss_mode == "cispo" else "clip",
            ratio_level="sequence" if loss_mode == "gspo" else "token",
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            dual_clip=actor.clip_ratio_c if loss_mode == "vanilla" else None,
            log_ratio_clamp=None if loss_mode == "gspo" else 20.0,
            aggregation=AGGREGATIONS[actor.loss_agg_mode],
            aggregation_constant=actor.loss_scale_factor or 1.0,
            kl_estimator=estimator,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_input_clamp=20.0 if estimator == "k3" else None,
            kl_output_clamp=10.0 if estimator == "k3" else None,
            entropy_coef=actor.entropy_coeff,
            logprobs_upcast=False,
            importance_level=level or "none",
            importance_mode="truncate" if low is None else "mask",
            importance_low=low or 0.0,
            importance_high=high,
        )

    def configured(self, **changes: Any) -> Self:
        actor, algorithm = _settings(self.actor, self.algorithm, self.conventions, changes)
        return type(self)(actor, algorithm)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch

        engine = _engine(self._actor_config, None)
        tokens = token_ids.numel()
        outputs = engine.prepare_model_outputs(
            output=SimpleNamespace(logits=logits.reshape(1, tokens, -1)),
            output_args={
                "input_ids_rmpad_rolled": token_ids.flatten(),
                "temperature_rmpad": torch.full((tokens,), temperature),
                "temperature_is_one": temperature == 1.0,
                "pad_size": 0,
            },
            micro_batch=_tensordict({"input_ids": _jagged(token_ids)}, use_remove_padding=True),
            logits_processor_func=None,
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
        import numpy as np
        import torch
        from verl.protocol import DataProto
        from verl.trainer.ppo.core_algos import AdvantageEstimator
        from verl.trainer.ppo.ray_trainer import compute_advantage

        config = self._algorithm_config
        data = DataProto.from_dict(
            tensors={
                "token_level_rewards": rewards.unsqueeze(1),
                "response_mask": torch.ones(len(rewards), 1, dtype=torch.long),
            },
            non_tensors={"uid": np.array([str(group) for group in group_ids.tolist()], dtype=object)},
        )
        computed = compute_advantage(
            data,
            adv_estimator=AdvantageEstimator(config.adv_estimator),
            norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo,
            config=config,
        )
        return computed.batch["advantages"].squeeze(1)  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro=n_micro)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, n_ranks=n_ranks)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from verl.trainer.ppo.core_algos import kl_penalty

        return kl_penalty(logprobs, ref_logprobs, self._actor_config.kl_loss_type)  # type: ignore[no-any-return]

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        if self.conventions.importance_level == "none":
            raise NotProvided("rollout_correction.rollout_is is not set")
        return self._corrected(trainer_logprobs, sampler_logprobs, mask)["rollout_is_weights"]

    def keep_group(self, rewards: Tensor) -> bool:
        """What `filter_groups` decides when it is enabled with the metric `reward`."""
        replay_buffer = _replay_buffer_module()
        keys = [f"group_{index}_0" for index in range(len(rewards))]
        scores = dict(zip(keys, rewards.view(-1, 1), strict=True))
        replay_buffer.tq = SimpleNamespace(  # type: ignore[attr-defined]
            kv_batch_get=lambda keys, **_: {"rm_scores": [scores[key] for key in keys]},
        )
        with _quiet():
            buffer = replay_buffer.ReplayBuffer(
                trainer_mode="sync",
                trainer_config=None,
                max_off_policy_threshold=None,
                max_off_policy_strategy="drop",
                sampler_kwargs=None,
                refill_fn=lambda prompts: None,
                filter_groups_metric="reward",
            )
        buffer.partitions["train"] = {key: {} for key in keys}
        buffer.finished_keys["train"] = {"group"}
        filtered, _ = buffer._dapo_filtered_keys("train")
        return "group" not in filtered

    def _scored(self, model: Any, batch: CollatedBatch, temperature: float, use_remove_padding: bool) -> Tensor:
        """The engine's forward step, read where the loss reads it."""
        import torch
        from verl.workers.utils.padding import no_padding_2_padding

        prompts = [
            ids[:start][kept[:start]]
            for ids, kept, start in zip(
                batch.input_ids, batch.attention_mask, batch.completion_starts.tolist(), strict=True
            )
        ]
        completions = [ids[kept] for ids, kept in zip(batch.completion_ids, batch.completion_mask, strict=True)]
        sequences = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
        data = _tensordict(
            {
                "input_ids": _ragged(sequences),
                "position_ids": _ragged([torch.arange(len(ids)) for ids in sequences]),
                "prompts": _ragged(prompts),
                "responses": _ragged(completions),
            },
            temperature=temperature,
            max_response_len=batch.completion_ids.shape[1],
            use_remove_padding=use_remove_padding,
        )
        scored = []

        def read(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            scored.append(no_padding_2_padding(model_output["log_probs"], data))
            return scored[0].sum(), {}

        engine = _engine(self._actor_config, None)
        engine.module = model
        with _on_cpu():
            engine.forward_step(data, loss_function=read, forward_only=False)
        return scored[0]  # type: ignore[no-any-return]

    def _update(self, batch: PolicyBatch, n_micro: int = 1, n_ranks: int = 1) -> LossOutput:
        """The engine's `forward_backward_batch` on each rank; the ranks' gradients are averaged, as FSDP does.

        The backward passes end at leaves that collect the weight with which each piece's loss went backward.
        """
        from verl.utils.metric import Metric
        from verl.utils.tensordict_utils import chunk_tensordict
        from verl.workers.utils.losses import ppo_loss

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the engine counts the tokens of the whole update itself")
        if len(batch.mask) % (n_ranks * n_micro):
            raise NotProvided("ranks and micro-batches have to be of equal size")
        data = self._update_data(batch, len(batch.mask) // (n_ranks * n_micro))

        def on_rank(rank: int, group: Any) -> tuple[Tensor, dict[str, Any]]:
            losses, leaves = [], []

            def loss_function(model_output: dict[str, Tensor], data: Any, dp_group: Any) -> tuple[Tensor, Any]:
                loss, metrics = ppo_loss(self._actor_config, model_output, data, dp_group)
                losses.append(loss)
                leaves.append(loss.detach().requires_grad_())
                return leaves[-1], metrics

            engine = _engine(self._actor_config, group)
            engine.module = lambda **_: None
            engine.prepare_model_outputs = partial(_given_outputs, batch)
            output = engine.forward_backward_batch(chunk_tensordict(data, n_ranks)[rank], loss_function)
            return sum(leaf.grad * loss for leaf, loss in zip(leaves, losses, strict=True)), output["metrics"]

        with _on_cpu():
            losses, metrics = zip(*_on_ranks(n_ranks, on_rank), strict=True)
        logged = {
            name: Metric.aggregate_dp([of_rank[name] for of_rank in metrics])
            for name, value in metrics[0].items()
            if isinstance(value, Metric)
        }
        return LossOutput(sum(losses) / n_ranks, self._metrics(logged))

    def _update_data(self, batch: PolicyBatch, micro_batch_size: int) -> Any:
        """What the trainer sends to its workers, with a prompt of one token and every position of a row a token."""
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
        return _tensordict(
            {name: _jagged(values) for name, values in fields.items()}
            | {
                "loss_mask": _jagged(batch.mask.long()),
                "input_ids": _jagged(tokens),
                "position_ids": _jagged(torch.arange(1 + width).expand(rows, -1)),
                "prompts": _jagged(tokens[:, :1]),
                "responses": _jagged(tokens[:, 1:]),
                "row": torch.arange(rows),
            },
            temperature=1.0,
            global_batch_size=rows,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=micro_batch_size,
        )

    def _corrected(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The fields that the trainer adds to, or changes in, a batch for its rollout correction."""
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

    def _metrics(self, logged: Mapping[str, float]) -> dict[str, float]:
        """In our names; what is aggregated like the loss is a mean over tokens under one aggregation only."""
        metrics = {
            "clip_fraction": float(logged["actor/pg_clipfrac"] + logged["actor/pg_clipfrac_lower"]),
            "ppo_kl": float(logged["actor/ppo_kl"]),
        }
        if self.conventions.aggregation == "token_mean":
            names = {"kl_loss": "kl", "actor/entropy_loss": "entropy"}
            metrics |= {ours: float(logged[theirs]) for theirs, ours in names.items() if theirs in logged}
        return metrics

    @cached_property
    def _actor_config(self) -> Any:
        from verl.workers.config import FSDPActorConfig, PolicyLossConfig

        settings = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **self.actor}
        return FSDPActorConfig(**settings | {"policy_loss": PolicyLossConfig(**settings.get("policy_loss", {}))})

    @cached_property
    def _algorithm_config(self) -> Any:
        from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig

        correction = self.algorithm.get("rollout_correction")
        return AlgoConfig(
            **self.algorithm | {"rollout_correction": correction and RolloutCorrectionConfig(**correction)}
        )


def _engine(actor_config: Any, group: Any) -> Any:
    """verl's engine for one rank of a group; its constructor would build FSDP, which needs a GPU."""
    import torch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    engine.engine_config = actor_config.engine
    engine.get_data_parallel_group = lambda: group
    engine.get_data_parallel_size = lambda: group.size()
    engine.ulysses_sequence_parallel_size = 1
    engine.use_ulysses_sp = False
    engine.pad_to_length = False
    engine._autocast_dtype = torch.float32
    return engine


def _on_ranks(n_ranks: int, run: Callable[[int, Any], Any]) -> list[Any]:
    """`run(rank, process group)` on every rank of a data-parallel group of threads."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]

    def on(rank: int) -> Any:
        return run(rank, dist.ProcessGroupGloo(store, rank, n_ranks, timedelta(seconds=60)))

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(on, range(n_ranks)))


def _given_outputs(given: PolicyBatch, micro_batch: Any, **_: Any) -> dict[str, Tensor]:
    import torch

    def flat(values: Tensor) -> Tensor:
        rows = values[micro_batch["row"]]
        # An output stands one position before the token that it scores; the last scores nothing.
        return torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1).flatten()

    outputs = {"log_probs": flat(given.logprobs)}
    if given.entropy is not None:
        outputs["entropy"] = flat(given.entropy)
    return outputs


def _tensordict(tensors: dict[str, Tensor], **others: Any) -> Any:
    from verl.utils import tensordict_utils

    return tensordict_utils.get_tensordict(tensors, others)


def _jagged(values: Tensor) -> Tensor:
    """[B, T] as the nested tensor that verl's workers receive."""
    import torch

    rows, width = values.shape
    offsets = torch.arange(0, rows * width + 1, width)
    with _quiet():
        return torch.nested.nested_tensor_from_jagged(values.flatten().contiguous(), offsets)


def _ragged(rows: list[Tensor]) -> Tensor:
    import torch

    with _quiet():
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _weight_bounds(threshold: Any) -> tuple[float | None, float]:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    high, low = _parse_rollout_is_threshold(threshold)
    return low, high


@contextmanager
def _on_cpu() -> Iterator[None]:
    """The CPU as verl's platform, which knows accelerators only."""
    from verl.plugin.platform import get_platform, set_platform

    with _quiet():
        platform = get_platform()
        set_platform(SimpleNamespace(device_name="cpu", current_device=lambda: "cpu"))
        try:
            yield
        finally:
            set_platform(platform)


@cache
def _replay_buffer_module() -> ModuleType:
    """verl's replay buffer, loaded alone: its package starts with TransferQueue, which is a store on Ray.

    Raises:
        NotProvided: this version of verl has none.
    """
    import verl.trainer.ppo

    path = Path(verl.trainer.ppo.__path__[0], "v1", "replay_buffer.py")
    if not path.exists():
        raise NotProvided("this version of verl filters groups in its recipes only")
    spec = importlib.util.spec_from_file_location("rlcanary.adapters._verl_replay_buffer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    installed = sys.modules.get("transfer_queue")
    store = ModuleType("transfer_queue")
    store.KVBatchMeta = object  # type: ignore[attr-defined]
    sys.modules["transfer_queue"] = store
    try:
        with _quiet():
            spec.loader.exec_module(module)
    finally:
        del sys.modules["transfer_queue"]
        if installed is not None:
            sys.modules["transfer_queue"] = installed
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Without verl's remarks on missing GPUs and engines, which would stand between the report's lines."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _settings(
    actor: dict[str, Any], algorithm: dict[str, Any], conventions: Conventions, changes: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Actor and algorithm settings for changed conventions.

    Raises:
        NotProvided: verl has no such option.
    """
    wanted = conventions.replace(**changes)
    actor, algorithm = dict(actor), dict(algorithm)
    advantage = (wanted.advantage_baseline, wanted.advantage_scale)
    loss_mode = {("clip", "token"): "vanilla", ("clip", "sequence"): "gspo", ("cispo", "token"): "cispo"}.get(
        (wanted.objective, wanted.ratio_level)
    )
    for name in changes:
        match name:
            case "advantage_baseline" | "advantage_scale" if advantage in (("mean", "group"), ("mean", "none")):
                algorithm |= {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": wanted.advantage_scale == "group"}
            case "advantage_baseline" | "advantage_scale" if advantage == ("leave_one_out", "none"):
                algorithm["adv_estimator"] = "rloo"
            case "objective" | "ratio_level" if loss_mode is not None:
                actor["policy_loss"] = {**actor.get("policy_loss", {}), "loss_mode": loss_mode}
            case "clip_low" if wanted.clip_low is not None:
                actor["clip_ratio_low"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None:
                actor["clip_ratio_high"] = wanted.clip_high
            case "dual_clip" if wanted.dual_clip is not None and loss_mode == "vanilla":
                actor["clip_ratio_c"] = wanted.dual_clip
            case "aggregation" if wanted.aggregation in AGGREGATIONS.values():
                actor["loss_agg_mode"] = {ours: theirs for theirs, ours in AGGREGATIONS.items()}[wanted.aggregation]
                if wanted.aggregation == "constant":
                    actor["loss_scale_factor"] = wanted.aggregation_constant
            case "aggregation_constant":
                actor["loss_scale_factor"] = wanted.aggregation_constant
            case "kl_estimator":
                actor["kl_loss_type"] = wanted.kl_estimator
            case "kl_coef":
                actor |= {"use_kl_loss": wanted.kl_coef != 0, "kl_loss_coef": wanted.kl_coef}
            case "entropy_coef":
                actor["entropy_coeff"] = wanted.entropy_coef
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                if wanted.importance_mode == "mask" and wanted.importance_low <= 0:
                    raise NotProvided("the lower bound of rollout_is_threshold has to be above zero")
                high, low = wanted.importance_high, wanted.importance_low
                algorithm["rollout_correction"] = {
                    **(algorithm.get("rollout_correction") or {}),
                    "rollout_is": None if wanted.importance_level == "none" else wanted.importance_level,
                    "rollout_is_threshold": f"{low}_{high}" if wanted.importance_mode == "mask" else high,
                }
            case _:
                raise NotProvided(f"verl has no {name}={changes[name]!r}")
    return actor, algorithm
