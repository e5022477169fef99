"""torchrl's LLM losses, advantage transform and model wrapper as an adapter.

The loss is torchrl's own with its own distribution class behind it; only the actor's forward pass is replaced, by given
logprobs and entropies. Written for torchrl 0.14.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import kl_of_each_token, micro_batches, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.torchrl.data import completion_of, full_length, generate_kwargs, given_actor, ragged_rows
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Aggregation, Conventions
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Completion, PolicyBatch

AGGREGATIONS: dict[str, Aggregation] = {"token_mean": "token_mean", "prompt_mean": "sequence_mean"}
METRICS = {"kl_to_ref": "kl", "entropy": "entropy", "clip_fraction": "clip_fraction", "kl_approx": "approx_kl"}


class TorchrlAdapter(Adapter):
    """Adapter of torchrl under some settings, by default its own."""

    name = "torchrl"

    def __init__(
        self,
        loss: Mapping[str, Any] | None = None,
        advantage: Mapping[str, Any] | None = None,
        loss_class: str = "GRPOLoss",
    ) -> None:
        """Set up the adapter with settings of torchrl's classes.

        Args:
            loss: keyword arguments of the loss.
            advantage: keyword arguments of `MCAdvantage`, except for the group's size and the keys.
            loss_class: `GRPOLoss`, `DAPO` or `CISPOLoss`.

        Raises:
            UserError: torchrl is not installed, or the conventions cannot express a setting.
        """
        with usable("torchrl", "pip install 'rlcanary[torchrl]'", "torchrl 0.14", at_least="0.14"), quiet():
            import torchrl.modules.llm
            import torchrl.objectives.llm
            import torchrl.trainers  # noqa: F401
        self.loss = dict(loss or {})
        self.advantage = dict(advantage or {})
        self.loss_class = loss_class
        unknown = sorted({"kl_to_inference_coeff", "kl_mask_threshold", "reduction"} & set(self.loss))
        if unknown:
            raise UserError(f"the conventions cannot express {', '.join(unknown)} of {loss_class}")
        if self._loss_module.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise UserError(f"aggregation={self._loss_module.aggregation!r}: this adapter knows {known}")

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        loss = self._loss_module
        return Conventions(
            advantage_ddof=1,
            advantage_eps=1e-6,
            advantage_eps_mode="clamp",
            singleton_group="nan",
            objective="cispo" if self.loss_class == "CISPOLoss" else "clip",
            clip_low=_exact(loss.clip_epsilon_low),
            clip_high=_exact(loss.clip_epsilon_high),
            aggregation=AGGREGATIONS[loss.aggregation],
            kl_estimator="k3",
            kl_coef=loss.kl_to_ref_coeff or 0.0,
            entropy_coef=loss.entropy_coeff if loss.entropy_bonus else 0.0,
            logprobs_upcast=False,
            old_logprobs="sampler",
            max_grad_norm=1.0,
        )

    def configured(self, **changes: Any) -> Self:
        loss, loss_class = _settings(self.loss, self.loss_class, self.conventions, changes)
        return type(self)(loss, self.advantage, loss_class)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        if temperature != 1.0:
            raise NotProvided("torchrl scores tokens at temperature 1 only")
        return _distribution(logits).log_prob(token_ids)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, pad_model_input=True)

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return self._scored(model, batch, temperature, pad_model_input=False)

    def entropy(self, logits: Tensor) -> Tensor:
        return _distribution(logits).entropy()  # type: ignore[no-any-return]

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        """Return the wrapper's mask over the output of a transformers model's `generate`: padding after the first EOS."""
        import torch
        from tensordict import TensorDict, lazy_stack

        is_eos = torch.isin(completion_ids, torch.tensor(list(eos_token_ids)))
        is_finished = (is_eos.cumsum(dim=1) - is_eos.long()) > 0
        generated = completion_ids.masked_fill(is_finished, pad_token_id)
        prompt = (completion_ids.new_tensor([5]) if pad_token_id != 5 else completion_ids.new_tensor([6])).long()

        def generate(input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"sequences": torch.cat([input_ids, generated], dim=1)}

        model = SimpleNamespace(generate=generate)
        wrapper = self._wrapped(model, generate=True, return_log_probs=False, pad_output=True)
        wrapper.tokenizer.pad_token_id = pad_token_id
        rows = lazy_stack([TensorDict({"tokens": {"prompt": prompt}}) for _ in completion_ids])
        with quiet():
            scored = wrapper(rows)
        return scored["masks", "all_attention_mask"][:, 1:]  # type: ignore[no-any-return]

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        _, counts = torch.unique(group_ids, return_counts=True)
        if len(counts.unique()) != 1:
            raise NotProvided("grpo_size is one size for all groups")
        written = self._written(rewards, group_ids, int(counts[0]))
        if written is None or len(written) != len(rewards):
            raise NotProvided("keep_return_bounds drops these groups")
        advantages = rewards.new_empty(len(rewards))
        advantages[written["row"]] = written["advantage"].flatten().to(rewards.dtype)
        return advantages

    def keep_group(self, rewards: Tensor) -> bool:
        import torch

        if self.advantage.get("keep_return_bounds") is None:
            raise NotProvided("keep_return_bounds is not set, without it every group is kept")
        if ((rewards != 0) & (rewards != 1)).any():
            raise NotProvided(
                "keep_return_bounds bounds the mean, which tells groups apart for rewards of 0 and 1 only"
            )
        return self._written(rewards, torch.zeros(len(rewards)), len(rewards)) is not None

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = self._loss_output(batch)
        return LossOutput(sum(_losses(output).values()).reshape(()), self._metrics(output, batch))  # type: ignore[union-attr]

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Run the trainer's optimization stepper; its backward passes end at leaves that collect each piece's weight."""
        import torch
        from torchrl.trainers import MixedPrecisionOptimizationStepper

        pieces = micro_batches(batch, n_micro)
        parameter = torch.nn.Parameter(torch.zeros(()))
        stepper = MixedPrecisionOptimizationStepper(torch.optim.SGD([parameter]), gradient_accumulation_steps=n_micro)
        losses: list[Tensor] = []
        leaves: list[Tensor] = []

        def compute_loss(piece: PolicyBatch) -> Any:
            output = self._loss_output(piece)
            for name, loss in _losses(output).items():
                losses.append(loss)
                leaves.append(loss.detach().requires_grad_())
                output.set(name, leaves[-1])
            return output

        for piece in pieces:
            stepper.step(SimpleNamespace(compute_loss=compute_loss), piece)
        weighted = [(leaf.grad * loss).reshape(()) for leaf, loss in zip(leaves, losses, strict=True)]  # type: ignore[operator]
        return LossOutput(torch.stack(weighted).sum())

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        # torchrl leaves the mode of the model to the training script, and its own script switches dropout off.
        return super().new_state(model.eval(), ref_model, learning_rate)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """Run the trainer's optimization stepper and learning-rate hook, with torchrl's model wrapper as the actor."""
        from torchrl.trainers import LRSchedulerHook, MixedPrecisionOptimizationStepper

        loss = self._new_loss(self._wrapped(state.model, generate=False))
        data = self._step_data(state, batch)
        stepper = MixedPrecisionOptimizationStepper(state.optimizer)
        with quiet():
            output = stepper.step(SimpleNamespace(compute_loss=loss), data)
        LRSchedulerHook(state.scheduler)()
        metrics = {ours: output.get(theirs, None) for theirs, ours in {**METRICS, "grad_norm": "grad_norm"}.items()}
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Compute each token's KL as the loss's KL term over it alone with coefficient 1."""
        only_kl = _with_coefficient_one()
        return kl_of_each_token(lambda token: only_kl._loss_output(token).loss_kl_to_ref, logprobs, ref_logprobs)

    def new_engine(self, model: Any) -> Any:
        """Copy the model; the wrapper samples from the copy."""
        return copy.deepcopy(model)

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample with the wrapper in the mode that rollouts use."""
        import torch
        from tensordict import TensorDict, lazy_stack

        if not hasattr(engine, "generation_config"):
            raise NotProvided("torchrl samples from a transformers model in this process")
        request = Sampling(**sampling).with_ends(())
        if request.temperature == 0 and request.n > 1:
            raise NotProvided("greedy sampling gives one completion")
        wrapper = self._wrapped(engine, generate=True, generate_kwargs=generate_kwargs(request))
        rows = lazy_stack([TensorDict({"tokens": {"prompt": torch.tensor(prompt)}}) for prompt in prompts])
        # An unseeded request goes on from the caller's random state, which a check has seeded.
        seed = int(torch.randint(2**62, ())) if request.seed is None else request.seed
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            groups = wrapper(rows).reshape(len(prompts), -1).unbind(0)
        return [[completion_of(row, request) for row in group.unbind(0)] for group in groups]

    def _scored(self, model: Any, batch: CollatedBatch, temperature: float, pad_model_input: bool) -> Tensor:
        """Return the policy's logprobs as the loss takes them; a temperature goes into torchrl's `generate_kwargs`."""
        import torch

        wrapper = self._wrapped(
            model, generate=False, generate_kwargs={"temperature": temperature}, pad_model_input=pad_model_input
        )
        with quiet():
            logprobs, _, _ = self._new_loss(wrapper)._get_cur_log_prob(ragged_rows(batch))
        # Rows end together, for torchrl pads them on the left.
        lengths = tokens_of_completions(batch).sum(dim=1).tolist()
        completions = [row[len(row) - length :] for row, length in zip(logprobs, lengths, strict=True)]
        width = batch.completion_ids.shape[1]
        return torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in completions]
        )

    def _step_data(self, state: Any, batch: CollatedBatch) -> Any:
        """Return rollouts as they come from the replay buffer, with advantages and, for a KL term, reference logprobs."""
        import torch

        if batch.old_logprobs is None:
            raise NotProvided("torchrl takes the ratio against the sampler's logprobs")
        if not torch.equal(batch.completion_mask, tokens_of_completions(batch)):
            raise NotProvided("the adapter gives torchrl no mask of tool tokens")
        data = ragged_rows(batch)
        advantages = self.advantages(batch.rewards, batch.group_ids)
        given: dict[tuple[str, ...], list[Tensor]] = {("log_probs", "full"): full_length(batch.old_logprobs, batch)}
        if self._loss_module.kl_to_ref_coeff:
            if batch.ref_logprobs is not None:
                given["next", "ref_log_probs", "full"] = full_length(batch.ref_logprobs, batch)
            elif state.ref_model is not None:
                with quiet(), torch.no_grad():
                    scored = self._wrapped(state.ref_model, generate=False)(ragged_rows(batch))
                given["next", "ref_log_probs", "full"] = scored.get(("log_probs", "full"), as_list=True)
            else:
                raise NotProvided("kl_to_ref_coeff needs a reference")
        for row, fields in enumerate(data.tensordicts):
            fields["advantage"] = advantages[row].view(1, 1)
            for key, values in given.items():
                fields[key] = values[row]
        return data

    def _written(self, rewards: Tensor, group_ids: Tensor, size: int) -> Any:
        """Return the data that `MCAdvantage` writes to the replay buffer for one-step trajectories of groups, or None."""
        import torch
        from tensordict import TensorDict
        from torchrl.objectives.llm import MCAdvantage

        rows = len(rewards)
        steps = TensorDict(
            {
                "group": group_ids.unsqueeze(1),
                "row": torch.arange(rows).unsqueeze(1),
                "next": {
                    # The reward has the shape that torchrl's reward parsers give it: one for all tokens of a step.
                    "reward": rewards.clone().view(rows, 1, 1, 1),
                    "done": torch.ones(rows, 1, 1, dtype=torch.bool),
                },
            },
            batch_size=[rows, 1],
        )
        if size < 2 and self.advantage.get("trajectory_return") is not None:
            raise NotProvided("trajectory_return needs groups of at least two")
        with quiet():
            return MCAdvantage(grpo_size=size, prompt_key="group", **self.advantage).inv(steps)

    def _loss_output(self, batch: PolicyBatch) -> Any:
        from tensordict import TensorDict

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("torchrl's loss has no global counts")
        loss = self._loss_module
        if loss.kl_to_ref_coeff and batch.ref_logprobs is None:
            raise NotProvided("kl_to_ref_coeff needs reference logprobs")
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        data: dict[str, Any] = {
            "tokens": {"full": batch.mask.long()},
            "log_probs": {"full": batch.old_logprobs},
            "advantage": advantages.unsqueeze(-1),
            "given": {"log_prob": batch.logprobs, "mask": batch.mask},
        }
        if batch.entropy is not None:
            data["given"]["entropy"] = batch.entropy
        if batch.ref_logprobs is not None:
            data["next"] = {"ref_log_probs": {"full": batch.ref_logprobs}}
        with quiet():
            return loss(TensorDict(data, batch_size=[len(batch.mask)]))

    def _metrics(self, output: Any, batch: PolicyBatch) -> dict[str, float]:
        metrics = {ours: output.get(theirs) for theirs, ours in METRICS.items()}
        if batch.entropy is None:
            metrics["entropy"] = None
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def _wrapped(self, model: Any, **settings: Any) -> Any:
        from torchrl.modules.llm import TransformersWrapper

        from rlcanary.tiny_models import tiny_tokenizer

        forward = getattr(model, "forward", None)  # a model that only generates has none
        if forward is not None and list(inspect.signature(forward).parameters)[1:2] != ["attention_mask"]:
            raise NotProvided(
                "torchrl passes the attention mask as second argument, where this model takes another one"
            )
        return TransformersWrapper(model, tokenizer=tiny_tokenizer(), input_mode="tokens", **settings)

    @cached_property
    def _loss_module(self) -> Any:
        return self._new_loss(given_actor())

    def _new_loss(self, actor: Any) -> Any:
        import torchrl.objectives.llm

        return getattr(torchrl.objectives.llm, self.loss_class)(actor, **self.loss)


def _distribution(logits: Tensor) -> Any:
    import torch
    from torchrl.modules.distributions import LLMMaskedCategorical

    return LLMMaskedCategorical(logits=logits, mask=torch.ones(logits.shape[:-1], dtype=torch.bool))


def _losses(output: Any) -> dict[str, Tensor]:
    """Return the losses that the trainer adds up and sends backward."""
    return {name: value for name, value in output.items() if name.startswith("loss") and value is not None}


def _exact(buffer: Tensor) -> float:
    """Return the intended number of a float32: 0.2, not 0.20000000298."""
    return float(f"{float(buffer):.6g}")


@cache
def _with_coefficient_one() -> TorchrlAdapter:
    return TorchrlAdapter({"kl_to_ref_coeff": 1.0, "entropy_bonus": False})


def _settings(
    loss: dict[str, Any], loss_class: str, conventions: Conventions, changes: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return the loss's arguments and class for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of torchrl.
    """
    wanted = conventions.replace(**changes)
    result = dict(loss)
    for name in changes:
        match name:
            case "clip_low" | "clip_high" if wanted.clip_low is not None and wanted.clip_high is not None:
                result["clip_epsilon"] = (wanted.clip_low, wanted.clip_high)
            case "aggregation" if wanted.aggregation in AGGREGATIONS.values():
                result["aggregation"] = {ours: theirs for theirs, ours in AGGREGATIONS.items()}[wanted.aggregation]
            case "objective" if wanted.objective in ("clip", "cispo"):
                loss_class = "CISPOLoss" if wanted.objective == "cispo" else "GRPOLoss"
            case "kl_coef":
                result["kl_to_ref_coeff"] = wanted.kl_coef
            case "entropy_coef":
                result |= {"entropy_bonus": wanted.entropy_coef != 0, "entropy_coeff": wanted.entropy_coef}
            case _:
                raise NotProvided(f"this adapter has no setting of torchrl for {name}={changes[name]!r}")
    return result, loss_class
