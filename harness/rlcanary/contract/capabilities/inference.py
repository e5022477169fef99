"""The inference engine: sampling, rollouts and the weights that they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion, Group
    from rlcanary.contract.state import Item


class Inference:
    """Sampling from an engine that has the trainer's weights."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Sample and score `sampling["n"]` completions per item, concurrently -> one group per item, in order.

        The engine is a `rlcanary.contract.engine.Engine`; completions end in any order and come with their text. The checks'
        engine also has the `tokenizer` that decoded them, for code that decodes itself. A completion that comes back with
        the finish reason "abort" was interrupted: it is continued by a request for its prompt and ids together, kept with
        that reason, or left out with its group.
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
