"""The adapter base class, through which the checks call a codebase's own functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rlcanary.contract.conventions import Conventions

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch


@dataclass
class TrainState:
    """The state of an optimizer update. A codebase's own state object will do if it has these attributes.

    Attributes:
        model: the policy in training, called with input_ids, attention_mask and position_ids.
        optimizer: a torch optimizer over its parameters, or over copies of them such as float32 masters.
        scheduler: a torch learning-rate scheduler, stepped once per update.
        ref_model: the reference model, or None where there is no KL term.
        eval_items: the items that an evaluation answers and is rewarded for.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    ref_model: Any = None
    eval_items: Sequence[Item] = ()


@dataclass(frozen=True)
class Item:
    """A prompt of the dataset and how its completions are rewarded.

    Attributes:
        id: identifies the item.
        prompt_ids: the ids given to the sampler.
        reward: the item's own reward function, from the text of a completion. It may return None (not scorable), return
            0.0 (wrong) or raise, which are three different things.
    """

    id: Hashable
    prompt_ids: Sequence[int]
    reward: Callable[[str], float | None]


class NotProvided(Exception):
    """Raised for a capability that the adapter lacks, with the reason if there is one."""


class Adapter:
    """Base class of adapters. Override the capabilities that your codebase has; one is enough to start.

    Attributes:
        name: the codebase's name in reports.
        conventions: the choices that the codebase declares. The checks test it against these.

    Shapes: B rows (completions), T completion positions, V vocabulary entries. A capability that cannot take some input
        (groups of unequal size, say) raises `NotProvided` with the reason; the check then reports that instead of
        failing.
    """

    name: str = "unnamed"
    conventions: Conventions = Conventions()

    def configured(self, **changes: Any) -> Self:
        """Return an adapter of the same codebase with other conventions, such as `kl_coef=0.5`.

        Raises:
            NotProvided: the codebase has no such setting.
        """
        raise NotProvided("needs configured: another setting than the declared one")

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """[B, T, V] logits that score [B, T] ids at their own position -> [B, T] logprobs at this temperature."""
        raise NotProvided

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """Forward pass, shift and gather -> [B, T] logprobs of `batch.completion_ids`."""
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
        """Loss to minimise, differentiable with respect to `batch.logprobs`, with its KL and entropy terms."""
        raise NotProvided

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """The same update in `n_micro` micro-batches. The gradient of the returned loss is the accumulated gradient."""
        raise NotProvided

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        """The same update over `n_ranks` data-parallel ranks, with the metrics that rank 0 logs.

        The gradient of the returned loss is the reduced gradient.
        """
        raise NotProvided

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        """Micro-batches per update and data-parallel rank; `n_ranks` counts all, `sequence_parallel` of them share rows."""
        raise NotProvided

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """`completion_logprobs` with the rows packed into one sequence without padding -> [B, T]."""
        raise NotProvided

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[B, T] and [B, T] logprobs of the same tokens -> [B, T] KL estimates, differentiable in the first."""
        raise NotProvided

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T] trainer logprobs, sampler logprobs and mask -> [B, T] weights that correct for their mismatch."""
        raise NotProvided

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Groups -> one rectangular batch, rows of a group together and in order."""
        raise NotProvided

    def keep_group(self, rewards: Tensor) -> bool:
        """[G] rewards of one group -> whether dynamic sampling keeps the group.

        A filter that is made for rewards of 0 and 1 declines others with `NotProvided`.
        """
        raise NotProvided

    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        """A conversation -> its ids and, per id, whether it is trained.

        Messages have a role and content. The assistant messages that this rollout sampled carry `"sampled": True`; their
        tokens and end-of-turn tokens are trained, earlier assistant messages are history and are not. A sampled message
        may carry `"token_ids"`, the ids that the sampler drew: they stand in the result as they are, because encoding
        their text again can give others, and an end-of-turn token that is not among them was not sampled. Code that
        renders from text alone declines such messages with `NotProvided`.
        """
        raise NotProvided

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        """Score each completion with its own item's reward function -> [B], NaN where that returned None or raised."""
        raise NotProvided

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Sample and score `sampling["n"]` completions per item, concurrently -> one group per item, in order.

        The engine is a `rlcanary.contract.engine.Engine`; completions end in any order and come with their text. The checks'
        engine also has the `tokenizer` that decoded them, for code that decodes itself.
        """
        raise NotProvided

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        """Indices that this rank visits in this epoch, in order. They depend only on the arguments and the run's seed."""
        raise NotProvided

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        """Indices that this rank visits next in a run that was stopped after its first `consumed` items and resumed.

        The next `count` of them, over the ends of epochs. `data_order` has the order of each epoch.
        """
        raise NotProvided

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """One optimizer update on a `TrainState` -> logged metrics.

        Advantages come from `batch.rewards`. Reference logprobs come from the batch or, where it has none, from
        `state.ref_model`. Metrics go under the names of `LossOutput` and `lr` (that of this update), `grad_norm` (before
        clipping), `reward` (mean of the rewards) and `tokens` (attended tokens of the batch). A metric that is not
        logged is not compared.
        """
        raise NotProvided

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        """Write a checkpoint of a `TrainState` into an existing folder, where earlier ones of the run may be."""
        raise NotProvided

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        """Load the latest checkpoint of a folder into a new state, made as at the start of the run -> the state to train."""
        raise NotProvided

    def evaluate(self, state: Any) -> dict[str, float]:
        """Evaluate a `TrainState` without changing it -> logged metrics, without times and speeds.

        If the state has `eval_items`, `reward` is the mean reward of the model's completions for them.
        """
        raise NotProvided

    def sync_weights(self, state: Any, engine: Any) -> None:
        """Copy the trainer's weights into the inference engine, also where no update ran since the last sync."""
        raise NotProvided

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample completions for prompts -> one list of completions per prompt, in order.

        `sampling` has temperature, top_p, top_k, max_new_tokens, n, seed and eos_token_ids, as
        `rlcanary.contract.sampling.Sampling` names them.
        """
        raise NotProvided

    def new_model(self, seed: int) -> Any:
        """Create a tiny model of your own architecture, random from this seed, on which every check with a model runs too.

        It is called with input_ids, attention_mask and position_ids, returns an object with `logits` [B, S, V], and has a
        vocabulary of at least 64 ids.
        """
        raise NotProvided

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        """Create a state to train this model from: by default AdamW without weight decay and a constant learning rate.

        Override it where your trainer wraps the model, builds its optimizer or has a schedule of its own. The checks give
        models in half precision to your own only: without float32 masters small updates are lost.
        """
        import torch

        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ref_model)

    def new_engine(self, model: Any) -> Any:
        """Create an engine with a copy of this model's weights, by default `rlcanary.contract.engine.InProcessEngine`."""
        from rlcanary.contract.engine import InProcessEngine

        return InProcessEngine(model)


SETTINGS = ("name", "conventions", "configured", "new_model", "new_state", "new_engine")
CAPABILITIES = tuple(name for name in vars(Adapter) if not name.startswith("_") and name not in SETTINGS)


def provided(adapter: Adapter) -> frozenset[str]:
    """Names of the capabilities that this adapter overrides, in its class or on the instance."""
    return frozenset(
        name for name in CAPABILITIES if getattr(getattr(adapter, name), "__func__", None) is not getattr(Adapter, name)
    )
