"""Collect conversations of an environment, many at once, each handed over when it or all of its row are over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from rlcanary.contract.batch import Group
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.engine_pool import EnginePool, RequestFailed
from rlcanary.grpo.rollout.collector import Collector, Lost, as_completed, in_full, retried, seeded

if TYPE_CHECKING:
    from rlcanary.grpo.data.datasets import Row
    from rlcanary.grpo.rollout.environment import ChatEnvironment, Conversation


class ConversationCollector(Collector):
    """A `Collector` whose groups are the conversations about the rows of an environment."""

    def __init__(self, environment: ChatEnvironment, *arguments: Any, **settings: Any) -> None:
        """Take the parts of a `Collector`, with the rows of the environment as its items."""
        super().__init__(*arguments, **settings)
        self._environment = environment
        self._one_by_one = False  # conversations are always sampled each alone

    async def groups(
        self, limit: int | None = None, *, yield_completed_trajectories: bool = False
    ) -> AsyncGenerator[Group, None]:
        """Yield groups as a `Collector` does, each completion a whole conversation after its first prompt."""
        stream = conversations(
            self._environment,
            self.items,
            self.pool,
            self._sampling,
            yield_completed_trajectories=yield_completed_trajectories,
            ahead=self._ahead,
            limit=limit,
            lost=self.lost,
        )
        async with aclosing(stream):
            async for of_row in stream:
                yield self._environment.group(of_row, self.items.epoch)


async def conversations(
    environment: ChatEnvironment,
    items: ItemIterator[Row],
    pool: EnginePool,
    sampling: Mapping[str, Any],
    *,
    yield_completed_trajectories: bool = False,
    ahead: int = 8,
    limit: int | None = None,
    lost: list[Lost] | None = None,
) -> AsyncGenerator[list[Conversation], None]:
    """Yield `sampling["n"]` conversations about each row, see `as_completed`: finished rows make room for others.

    A conversation whose request fails, or whose end cannot be scored, begins anew as often as the iterator retries; then its
    row has failed.

    Args:
        environment: the conversations' rules.
        items: an iterator over the environment's rows, whose epoch was started.
        pool: the engines.
        sampling: with `n` and a seed as `Collector` takes them.
        yield_completed_trajectories: yield each conversation alone as soon as it is over, instead of all of a row together.
            A row that fails may have yielded some before.
        ahead: rows under way at once.
        limit: most rows.
        lost: list that failed rows are added to.

    Raises:
        EnginesLost: there is no engine left.
    """
    n = sampling.get("n", 1)

    async def play(row: Row, index: int, attempt: int) -> Conversation:
        asked = seeded({**sampling, "n": 1}, items.epoch, row.id, attempt, index)
        conversation = await environment.play(pool, row, asked)
        if conversation.score is None or conversation.score.value is None:
            pool.counts["unscored"] += 1
            raise RequestFailed(f"the conversation could not be scored: {conversation.score}", pool.version, "unscored")
        return conversation

    async def sample(row: Row, index: int) -> tuple[Hashable, int, Conversation]:
        return row.id, index, await retried(items.retries, lambda attempt: play(row, index, attempt))

    stream = as_completed(items, sample, pool, per_item=n, is_final=True, ahead=ahead, limit=limit, lost=lost)
    if not yield_completed_trajectories:
        async with aclosing(in_full(stream, n)) as rows:
            async for of_row in rows:
                yield of_row
        return
    async with aclosing(stream):
        async for *_, conversation in stream:
            yield [conversation]
