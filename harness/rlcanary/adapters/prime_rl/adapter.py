"""prime-rl's loss, credit assignment and admission gate as an adapter. Written for prime-rl of August 2026.

Of an older tree it checks the parts that are there already.

Its default loss has a trust region on probabilities (DPPO) and a penalty on the squared log-ratio to the sampler, which
the conventions cannot express. Both are options. This adapter switches both off and checks everything else.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.batches import micro_batches
from rlcanary.adapters.frameworks import has_part, is_found, part, quiet, usable
from rlcanary.adapters.prime_rl import earlier
from rlcanary.adapters.prime_rl.other_losses import OtherLosses
from rlcanary.adapters.prime_rl.services import SERVICES
from rlcanary.adapters.prime_rl.training import OFF, Training
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import PolicyBatch

CONVENTIONS = Conventions(
    advantage_baseline="mean",
    advantage_scale="none",
    singleton_group="zero",
    clip_low=None,
    clip_high=None,
    aggregation="token_mean",
    kl_coef=0.0,
    entropy_coef=0.0,
    logprobs_upcast=False,
    training_dropout=True,
    approx_kl_estimator="k3",
    max_grad_norm=1.0,
)

# What the optimizer's configuration and that of sampling say.
OPTIONS = ("max_grad_norm", "temperature")
# Modules that older trees do not have.
NEWER = (
    "prime_rl.orchestrator.algo.grpo",
    "prime_rl.orchestrator.curriculum.gates.adv",
    "prime_rl.orchestrator.metrics",
)
ALGORITHM = "prime_rl.orchestrator.algo.grpo:GRPOAlgorithm"


class PrimeRlAdapter(Training, OtherLosses):
    """Adapter of prime-rl with its default loss, whose trust region and penalty are off."""

    name = "prime_rl"

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import prime-rl.

        Args:
            settings: the `max_grad_norm` of its optimizer, and the `temperature` of its samples.

        Raises:
            UserError: prime-rl is not installed.
        """
        install = "run this in the environment in which prime-rl trains, with rlcanary installed there"
        with usable("prime_rl", install, "prime-rl of August 2026"), absent(*SERVICES), quiet():
            import prime_rl.trainer.rl.loss  # noqa: F401

            for module in filter(is_found, NEWER):
                importlib.import_module(module)
        objective = "cispo" if earlier.holds_its_ratio() else "clip"
        self.conventions = CONVENTIONS.replace(objective=objective, **(settings or {}))

    def configured(self, **changes: Any) -> Self:
        changed = [name for name, value in changes.items() if getattr(self.conventions, name) != value]
        if unknown := [name for name in changed if name not in OPTIONS]:
            wanted = ", ".join(f"{name}={changes[name]!r}" for name in unknown)
            raise NotProvided(f"this adapter has no setting of prime-rl for {wanted}")
        return type(self)({name: changes.get(name, getattr(self.conventions, name)) for name in OPTIONS})

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch
        from prime_rl.trainer.rl.loss import selective_log_softmax

        if temperature != 1.0:
            raise NotProvided("the trainer scales the logits before it scores them")
        with torch.compiler.set_stance("force_eager"):
            return selective_log_softmax(logits, token_ids)  # type: ignore[no-any-return]

    def entropy(self, logits: Tensor) -> Tensor:
        import torch
        from prime_rl.trainer.rl.loss import compute_entropy

        with torch.compiler.set_stance("force_eager"):
            return compute_entropy(logits)  # type: ignore[no-any-return]

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        advantages = rewards.new_empty(len(rewards))
        for group in group_ids.unique():
            rows = (group_ids == group).nonzero().squeeze(1)
            advantages[rows] = rewards.new_tensor(self._credited(rewards[rows]))
        return advantages

    def keep_group(self, rewards: Tensor) -> bool:
        gate = part("prime_rl.orchestrator.curriculum.gates.adv:AdvRangeGate")
        config = part("prime_rl.configs.orchestrator:AdvRangeGateConfig")
        return gate(config()).admit(self._scored(rewards))  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return LossOutput(self._call(batch, batch))

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Accumulate as the trainer does: each micro-batch gets the update's token count, and FSDP's averaging is undone."""
        import torch

        return LossOutput(torch.stack([self._call(piece, batch) for piece in micro_batches(batch, n_micro)]).sum())

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        """Divide as the trainer does: each rank gets the token count of all, and FSDP's averaging is undone."""
        import torch

        if earlier.ranks_divide_alone():
            return LossOutput(torch.stack([self._call(piece, piece) for piece in micro_batches(batch, n_ranks)]).mean())
        return self.accumulated_loss(batch, n_ranks)

    def _credited(self, rewards: Tensor) -> list[float]:
        """Return the advantages of a group."""
        if not has_part(ALGORITHM):
            return earlier.advantages_of(rewards)
        return [trace.nodes[0].advantages[0] for trace in _traces(self._scored(rewards))]

    def _scored(self, rewards: Tensor) -> list[Any]:
        """Return one episode per reward, of one trace with one sampled token, after credit assignment."""
        owner = part(ALGORITHM)
        algorithm = owner.__new__(owner)
        algorithm.length_penalty = None
        episodes = [SimpleNamespace(traces=[_trace(reward)]) for reward in rewards.tolist()]
        asyncio.run(algorithm.score_group(episodes))
        return episodes

    def _call(self, piece: PolicyBatch, whole: PolicyBatch) -> Tensor:
        from prime_rl.trainer.rl.loss import compute_loss

        if whole.global_tokens is not None or whole.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        advantages = piece.advantages.unsqueeze(1) if piece.advantages.ndim == 1 else piece.advantages
        given = {
            "trainer_logprobs": list(piece.logprobs),
            "inference_logprobs": list(piece.old_logprobs),
            "advantages": list(advantages.expand(piece.mask.shape)),
            "loss_mask": list(piece.mask),
        }
        scale = max(int(whole.mask.sum()), 1)
        with quiet():
            if not earlier.has_components():
                return earlier.loss_of(given, scale, OFF)
            loss, _ = compute_loss(
                **given,
                ref_logprobs=None,
                rl_weights=None,
                ce_weights=None,
                ref_kl_weights=None,
                rl_loss_fn=self._loss,
                rl_scale=scale,
                ce_scale=1,
                ref_kl_scale=1,
            )
        return loss  # type: ignore[no-any-return]

    @cached_property
    def _loss(self) -> Any:
        from prime_rl.configs.trainer import DefaultLossConfig
        from prime_rl.trainer.rl.loss import setup_rl_loss_fn

        return setup_rl_loss_fn(DefaultLossConfig(**OFF))


def _trace(reward: float) -> Any:
    node = SimpleNamespace(mask=[True], token_ids=[5], advantages=None)
    return SimpleNamespace(id="0", reward=reward, has_error=False, agent=SimpleNamespace(trainable=True), nodes=[node])


def _traces(episodes: list[Any]) -> Iterator[Any]:
    for episode in episodes:
        yield from episode.traces
