"""The objective of ms-swift's `GRPOTrainer` and its parts, by the trainer's own methods."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from ms_swift_settings import conventions_of, settings_for
from ms_swift_trainers import GRPO, grpo_trainer, own_tokenizer, row

from rlcanary.adapters.batches import kl_of_each_token, micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.trl.trainer.ranks import Ranks
from rlcanary.adapters.trl.trainer.state import group_size
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch

MODULE = "swift.rlhf_trainers.grpo_trainer"
# Swift's names of metrics, and the contract's.
METRICS = {"loss": "loss", "kl": "kl", "clip_ratio/region_mean": "clip_fraction"}


class SwiftObjective(Adapter):
    """What the loss of an update is made of."""

    name = "ms_swift"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import swift.

        Args:
            settings: fields of swift's `GRPOConfig`, by default those of `swift rlhf --rlhf_type grpo`.
        """
        with usable("swift", "pip install --no-deps ms-swift, beside trl 0.29", "ms-swift 4.5 and 4.6"), quiet():
            import swift.rlhf_trainers.grpo_trainer  # noqa: F401
        self.settings = dict(settings or {})

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        return conventions_of(self._trainer.args, self.settings)

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        made = type(self)(settings_for({**GRPO, **self.settings}, wanted, changes))
        for name in changes:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no setting of swift for {name}={changes[name]!r}")
        return made

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Make the adapter that another process has, without trainers."""
        return type(self)(self.settings)

    @property
    def _trainer(self) -> Any:
        """Return a trainer in the state in which its constructor left it."""
        trainer = copy.copy(_built(pickle.dumps(self.settings)))
        trainer.args = copy.copy(trainer.args)
        trainer.model = copy.copy(trainer.model)
        trainer.model_wrapped = trainer.model
        trainer.engine = copy.copy(trainer.engine)
        trainer.state = copy.copy(trainer.state)
        trainer.state.log_history = []
        trainer.template = copy.copy(trainer.template)
        trainer.template.tokenizer = own_tokenizer(trainer.template.tokenizer)
        trainer._metrics = {mode: type(values)(list) for mode, values in trainer._metrics.items()}
        trainer._logs = copy.deepcopy(trainer._logs)
        trainer.accelerator = copy.copy(trainer.accelerator)
        trainer.model.train()
        return trainer

    # Scoring

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return self._scored(logits, token_ids, temperature)[0]

    def entropy(self, logits: Tensor) -> Tensor:
        import torch

        found: Tensor = self._scored(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), 1.0)[1]
        return found

    def _scored(self, logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Any, Any]:
        """Run the forward pass of a batch with a model that has these logits behind a prompt of one token."""
        import torch

        trainer = self._trainer
        trainer.temperature = temperature
        # Behind the last token is a position that predicts nothing.
        ahead = torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)
        ids = torch.nn.functional.pad(token_ids, (1, 0))
        model = lambda **_: SimpleNamespace(logits=ahead)  # noqa: E731
        found: tuple[Any, Any] = trainer._get_logps_via_local_forward(model, {}, token_ids.shape[1], ids, True)
        return found

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        trainer = self._trainer
        trainer.temperature = temperature
        own = zip(prompts_of(batch), batch.completion_ids, tokens_of_completions(batch), strict=True)
        rows = [(prompt.tolist(), ids[kept].tolist()) for prompt, ids, kept in own]
        inputs, collated = self._collated(trainer, rows)
        with parameters_of(trainer, model):
            scores, _ = trainer._get_per_token_logps_and_entropies(model, inputs, collated)
        return batch.padded([each[kept] for each, kept in zip(scores, collated.completion_mask, strict=True)])

    def _collated(self, trainer: Any, rows: Sequence[tuple[list[int], list[int]]]) -> tuple[dict[str, Any], Any]:
        """Collate prompts and completions as swift does for its forward pass."""
        from swift.rl_core.data import GRPOSample
        from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch

        samples = [
            GRPOSample([], encoded={"input_ids": prompt + ids, "labels": [-100] * len(prompt) + ids})
            for prompt, ids in rows
        ]
        inputs, batch = collate_to_grpo_micro_batch(
            samples, trainer.template, device=trainer.accelerator.device, use_logits_to_keep=True
        )
        inputs.pop("labels")
        return inputs, batch

    # Advantages

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        size = group_size(group_ids.tolist())
        if size < 2:
            raise NotProvided("num_generations has to be greater than 1")
        trainer = self._trainer
        trainer.num_generations, trainer.args.steps_per_generation = size, 1
        (micro_batch,) = generated(trainer, [row(given_reward=float(reward)) for reward in rewards])
        found: Tensor = torch.as_tensor(micro_batch["grpo_batch"].advantages[:, 0])
        return found

    # The loss

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Compute each token's KL as the trainer's loss of it alone with advantage zero and beta 1."""
        with_beta_one = type(self)({**self.settings, "beta": 1.0, "loss_type": "grpo"})
        return kl_of_each_token(lambda token: with_beta_one.policy_loss(token).loss, logprobs, ref_logprobs)

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        import torch

        if self.conventions.importance_level == "none":
            raise NotProvided("rollout_importance_sampling_mode is not set")
        trainer = self._trainer
        trainer.disable_rollout_importance_sampling = False
        _, weights = trainer._get_rollout_is_correction(trainer_logprobs, sampler_logprobs, mask)
        return torch.where(mask, weights, 0.0)

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._loss_of_pieces([batch], batch)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._loss_of_pieces(micro_batches(batch, n_micro), batch)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        import torch

        _require_whole(batch)
        pieces = micro_batches(batch, n_ranks)

        def work(rank: int, trainer: Any) -> tuple[Tensor, dict[str, float]]:
            loss = _loss_of_piece(trainer, pieces[rank], batch)
            return loss, _logged(trainer, loss)

        trainer = self._prepared(1)
        with quiet():
            results = Ranks(n_ranks, MODULE).run(work, trainer)
        # The average of the ranks' gradients, as data parallelism has it.
        return LossOutput(torch.stack([loss for loss, _ in results]).mean(), results[0][1])

    def _loss_of_pieces(self, pieces: list[PolicyBatch], whole: PolicyBatch) -> LossOutput:
        import torch

        _require_whole(whole)
        trainer = self._prepared(len(pieces))
        with quiet():
            losses = [_loss_of_piece(trainer, piece, whole) for piece in pieces]
        loss = torch.stack(losses).sum()
        return LossOutput(loss, _logged(trainer, loss))

    def _prepared(self, n_micro: int) -> Any:
        """Return a trainer in an update of so many micro-batches."""
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = n_micro
        trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation = n_micro
        trainer.disable_rollout_importance_sampling = False
        return trainer


@lru_cache(maxsize=64)  # the checks ask for the same few settings over and over
def _built(settings: bytes) -> Any:
    own = pickle.loads(settings)
    return grpo_trainer({name: value for name, value in own.items() if name != "soft_cache_length"})


def generated(trainer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Have a trainer roll out and score rows -> its micro-batches. The policy's own scores are left out."""
    import torch

    def unscored(_model: Any, _inputs: Any, batch: Any, **_: Any) -> tuple[Any, None]:
        return torch.zeros(batch.completion_mask.shape), None

    trainer._get_per_token_logps_and_entropies = unscored
    with quiet():
        found: list[dict[str, Any]] = trainer._generate_and_score_completions(rows)
    return found


@contextmanager
def parameters_of(trainer: Any, model: Any) -> Iterator[None]:
    """Have the trainer know the parameters of a model's forward pass, which its constructor reads."""
    import inspect

    forward = model.forward if hasattr(model, "forward") else model
    with patch.object(trainer, "model_kwarg_keys", inspect.signature(forward).parameters.keys()):
        yield


def _require_whole(batch: PolicyBatch) -> None:
    if batch.global_tokens is not None or batch.global_sequences is not None:
        raise NotProvided("the trainer counts the tokens of the whole update itself")


def _loss_of_piece(trainer: Any, piece: PolicyBatch, whole: PolicyBatch) -> Tensor:
    """Run the training step of a micro-batch up to its backward pass -> the loss that it is given."""
    import torch

    # The model's forward pass is replaced by the given logprobs and entropies; the rest is the trainer's.
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (piece.logprobs, piece.entropy)
    given: list[Tensor] = []
    trainer.accelerator.backward = lambda loss, **_: given.append(loss)
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.training_step(trainer.model_wrapped, _inputs(trainer, piece, whole), torch.tensor(int(whole.mask.sum())))
    return given[0]


def _inputs(trainer: Any, piece: PolicyBatch, whole: PolicyBatch) -> dict[str, Any]:
    """Return a micro-batch as `_prepare_batch_inputs` leaves it."""
    import torch
    from swift.rl_core.advantage import expand_advantage_to_per_token
    from swift.rl_core.data import GRPOBatch

    if piece.advantages.ndim == 2:
        advantages = piece.advantages
    else:
        advantages = expand_advantage_to_per_token(piece.advantages, piece.mask)
    if trainer.rollout_importance_sampling_mode is not None and piece.sampler_logprobs is None:
        raise NotProvided("the correction needs the sampler's logprobs")
    batch = GRPOBatch(
        completion_mask=piece.mask,
        truncated_mask=torch.zeros(len(piece.mask), dtype=torch.bool),
        seq_lengths=torch.full((len(piece.mask),), piece.mask.shape[1]),
        old_per_token_logps=piece.old_logprobs,
        ref_per_token_logps=piece.ref_logprobs,
        rollout_per_token_logps=piece.sampler_logprobs,
        advantages=advantages,
        num_items_in_batch=whole.mask.sum(),
        logits_to_keep=piece.mask.shape[1],
    )
    return {"model_inputs": {"input_ids": piece.mask.long()}, "grpo_batch": batch}


def _logged(trainer: Any, loss: Tensor) -> dict[str, float]:
    """Have the trainer log the metrics of an update -> those of the loss, by the contract's names."""
    trainer.state.log_history = []
    trainer.log({"loss": float(loss.detach())})
    (log,) = trainer.state.log_history
    return {ours: log[theirs] for theirs, ours in METRICS.items() if log.get(theirs) is not None}
