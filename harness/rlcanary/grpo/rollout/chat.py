"""Encode conversations as ids: exactly the tokens that the policy wrote, over any number of turns.

Sampled tokens are never decoded and encoded again: sampled messages carry their ids, and these stand in every later
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcanary.contract.batch import Completion
from rlcanary.grpo.data.templates import require_chat_template
from rlcanary.grpo.engines.containers import LogProbs, Masks, Messages, Tokens
from rlcanary.reference.data import rendering


@dataclass(frozen=True)
class RenderedChats:
    """Conversations of B rows.

    Attributes:
        tokens: prompts up to the first sampled token, then everything that follows.
        masks: true on the tokens that were sampled.
        logprobs: logprobs of the sampler, NaN on all other tokens.
    """

    tokens: Tokens
    masks: Masks
    logprobs: LogProbs


def sampled_message(completion: Completion) -> dict[str, Any]:
    """Build the assistant's message of a completion, with its ids, logprobs and policy versions.

    Raises:
        ValueError: the completion was aborted, or came without its text.
    """
    if completion.finish_reason == "abort":
        raise ValueError("an aborted completion is no turn of a conversation: sample it again")
    if completion.text is None:
        raise ValueError("a completion without its text cannot be shown to tools and verifiers")
    return {
        "role": "assistant",
        "content": completion.text,
        "sampled": True,
        "token_ids": list(completion.token_ids),
        "logprobs": None if completion.logprobs is None else list(completion.logprobs),
        "token_versions": None if completion.token_versions is None else list(completion.token_versions),
    }


def render_chats(conversations: Sequence[Messages], tokenizer: Any) -> RenderedChats:
    """Encode whole conversations: the ids, a mask of the sampled ones, and the sampler's logprobs of these.

    Raises:
        UserError: the tokenizer has no chat template.
        ValueError: a message's logprobs are not one per id, or as for `rlcanary.reference.data.rendering.render`.
    """
    require_chat_template(tokenizer)
    prompts: dict[str, list[torch.Tensor]] = {"ids": [], "mask": [], "logprobs": []}
    responses: dict[str, list[torch.Tensor]] = {"ids": [], "mask": [], "logprobs": []}
    for messages in conversations:
        ids, sampled = rendering.render(messages, tokenizer)
        row = {
            "ids": torch.tensor(ids, dtype=torch.long),
            "mask": torch.tensor(sampled, dtype=torch.bool),
            "logprobs": torch.full((len(ids),), torch.nan),
        }
        reported = [logprob for message in messages if message.get("sampled") for logprob in _logprobs(message)]
        if len(reported) != sum(sampled):
            raise ValueError(
                f"{len(reported)} logprobs for {sum(sampled)} sampled tokens: messages carry their token_ids"
            )
        row["logprobs"][row["mask"]] = torch.tensor(reported)
        first = sampled.index(True) if True in sampled else len(ids)
        for name, values in row.items():
            prompts[name].append(values[:first])
            responses[name].append(values[first:])
    return RenderedChats(
        Tokens(prompts["ids"], responses["ids"]),
        Masks(prompts["mask"], responses["mask"]),
        LogProbs(prompts["logprobs"], responses["logprobs"]),
    )


def _logprobs(message: Mapping[str, Any]) -> list[float]:
    ids, logprobs = message.get("token_ids", ()), message.get("logprobs")
    if logprobs is None:
        return [torch.nan] * len(ids)
    if len(logprobs) != len(ids):
        raise ValueError(f"a message with {len(ids)} token_ids and {len(logprobs)} logprobs")
    return list(logprobs)
