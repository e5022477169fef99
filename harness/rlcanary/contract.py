"""The adapter: what a codebase gives so that the checks can call its own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rlcanary.conventions import Conventions

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.batch import CollatedBatch, Group, LossOutput, PolicyBatch


class NotProvided(Exception):
    """Raised by a capability that an adapter does not have, with the reason where there is one to give."""


class Adapter:
    """Subclass this, override what your codebase has, leave the rest. One method is enough to start.

    Attributes:
        name: how reports call this codebase.
        conventions: what the codebase means to do. The checks hold it to exactly this.

    Shapes: B rows (completions), T completion positions, V vocabulary entries. A capability that cannot take some input
    (groups of unequal size, say) raises `NotProvided` with the reason; the check then says so instead of failing.
    """

    name: str = "unnamed"
    conventions: Conventions = Conventions()

    def configured(self, **changes: Any) -> Self:
        """An adapter of the same codebase with other conventions, such as `kl_coef=0.5`.

        Raises:
            NotProvided: the codebase cannot be set so.
        """
        raise NotProvided("this adapter runs one configuration")

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """[B, T, V] logits that score [B, T] ids at their own position -> [B, T] logprobs at this temperature."""
        raise NotProvided

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """The whole path of forward pass, shift and gather -> [B, T] logprobs of `batch.completion_ids`."""
        raise NotProvided

    def entropy(self, logits: Tensor) -> Tensor:
        """[B, T, V] logits -> [B, T] entropy in nats."""
        raise NotProvided

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        """[B, T] sampled ids, padded on the right -> [B, T] bool, true up to and including the first EOS."""
        raise NotProvided

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] rewards and the group of each row -> [B] advantages."""
        raise NotProvided

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        """The loss to minimise, differentiable with respect to `batch.logprobs`, KL and entropy terms included."""
        raise NotProvided

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """The same update fed in `n_micro` pieces; the loss is what all the pieces' backward passes add up to."""
        raise NotProvided

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[B, T] and [B, T] logprobs of the same tokens -> [B, T] KL estimates, differentiable in the first."""
        raise NotProvided

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T] each -> [B, T] weights that correct for a sampler that differs from the trainer."""
        raise NotProvided

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Groups -> one rectangular batch, rows of a group together and in order."""
        raise NotProvided

    def keep_group(self, rewards: Tensor) -> bool:
        """[G] rewards of one group -> whether dynamic sampling keeps the group."""
        raise NotProvided

    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        """A conversation -> its ids and, per id, whether it is trained."""
        raise NotProvided

    def score(self, items: list[Any], completions: list[str]) -> Tensor:
        """One reward per completion, [B]."""
        raise NotProvided

    def rollout(self, engine: Any, items: list[Any], sampling: Mapping[str, Any]) -> list[Group]:
        """Sample completions for items concurrently: order, identity, truncation and version tags are kept."""
        raise NotProvided

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        """The indices that this rank visits in this epoch, in order."""
        raise NotProvided

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """One optimizer update on a state of model, reference model, optimizer and schedule -> logged metrics."""
        raise NotProvided

    def evaluate(self, state: Any) -> dict[str, float]:
        """Evaluate a state without changing it -> logged metrics."""
        raise NotProvided

    def sync_weights(self, state: Any, engine: Any) -> None:
        """Bring the trainer's weights into the inference engine."""
        raise NotProvided

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[Any]:
        """Sample completions for prompts -> one list of `Completion` per prompt."""
        raise NotProvided


CAPABILITIES = tuple(
    name for name in vars(Adapter) if not name.startswith("_") and name not in ("name", "conventions", "configured")
)


def provided(adapter: Adapter) -> frozenset[str]:
    """The capabilities that this adapter overrides, in its class or on the instance."""
    return frozenset(
        name for name in CAPABILITIES if getattr(getattr(adapter, name), "__func__", None) is not getattr(Adapter, name)
    )
