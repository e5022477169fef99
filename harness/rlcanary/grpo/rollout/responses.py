"""Ask a policy with texts, ids or conversations, and get its answers as all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Options
from rlcanary.grpo.data.templates import prompt_ids
from rlcanary.grpo.engines.containers import LogProbs, Masks, Messages, Tokens
from rlcanary.grpo.rollout.chat import sampled_message

Prompt = str | Sequence[int] | Messages
"""A text, which is encoded as it stands; ids; or the messages of a conversation, which the chat template writes."""


@dataclass(frozen=True)
class Responses:
    """One row per completion; the completions of a prompt follow each other.

    Attributes:
        completions: the completions as the engine gave them.
        tokens: prompts and completions.
        masks: true on the completions.
        logprobs: of the completions as they were drawn; of the prompts where they were wanted, NaN otherwise.
        texts: the texts of prompts and completions, with the special tokens of prompts.
        histories: the conversations with their answer; those of texts and ids are [].
    """

    completions: list[Completion]
    tokens: Tokens
    masks: Masks
    logprobs: LogProbs
    texts: list[tuple[str, str]]
    histories: list[list[Mapping[str, Any]]]


def respond(policy: Any, prompts: Sequence[Prompt], sampling: Options, *, prompt_logprobs: bool = False) -> Responses:
    """Sample completions of prompts of any kind.

    Args:
        policy: a `rlcanary.grpo.engines.policy.Policy`; its tokenizer encodes the prompts.
        prompts: the prompts; their kinds may be mixed.
        sampling: as for `Policy.generate`.
        prompt_logprobs: score the prompts too, at temperature 1.

    Raises:
        UserError: there is no chat template for a conversation.
        ValueError: as for `Policy.generate`.
    """
    encoded = [_encoded(prompt, policy.tokenizer) for prompt in prompts]
    groups = policy.generate(encoded, sampling)
    rows = [(prompt, ids, each) for prompt, ids, group in zip(prompts, encoded, groups, strict=True) for each in group]
    tokens = Tokens.of([ids for _, ids, _ in rows], [each.token_ids for _, _, each in rows])
    drawn = [
        torch.tensor([torch.nan] * len(each.token_ids) if each.logprobs is None else each.logprobs) for *_, each in rows
    ]
    unscored = [torch.full((len(ids),), torch.nan) for _, ids, _ in rows]
    with torch.no_grad():
        scored = policy.logprobs(tokens, strategy="attention").prompt if prompt_logprobs else unscored
    return Responses(
        [each for *_, each in rows],
        tokens,
        Masks.of(tokens),
        LogProbs(scored, drawn),
        [(policy.tokenizer.decode(ids), each.text or "") for _, ids, each in rows],
        [[*prompt, sampled_message(each)] if _is_conversation(prompt) else [] for prompt, _, each in rows],
    )


def _encoded(prompt: Prompt, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    return prompt_ids(prompt, tokenizer) if _is_conversation(prompt) else [*prompt]


def _is_conversation(prompt: Prompt) -> TypeGuard[Messages]:
    return not isinstance(prompt, str) and all(isinstance(each, Mapping) for each in prompt)
