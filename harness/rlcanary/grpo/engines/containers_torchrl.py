"""Convert the containers to torchrl's and back.

torchrl keeps three views of a row (prompt, response, full) and one flag for padding; which positions of a padded row hold
a token only its `Masks` say. Needs `rlcanary[torchrl]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcanary.grpo.engines.containers import ChatHistory, LogProbs, Masks, Text, Tokens


def tokens_to_torchrl(tokens: Tokens, pad_token_id: int | None = None) -> Any:
    """Convert ids to torchrl's `Tokens`: ragged, or padded with this id."""
    return _to_torchrl("Tokens", tokens, None if pad_token_id is None else tokens.padded(pad_token_id))


def logprobs_to_torchrl(logprobs: LogProbs, padded: bool = False) -> Any:
    """Convert logprobs to torchrl's `LogProbs`; NaN on unscored tokens and on padding."""
    return _to_torchrl("LogProbs", logprobs, logprobs.padded() if padded else None)


def masks_to_torchrl(masks: Masks, padded: bool = False) -> Any:
    """Convert masks to torchrl's `Masks`, which cover the whole row."""
    from torchrl.modules.llm import policies

    if padded:
        return policies.Masks(
            all_attention_mask=torch.cat(masks.attention(), dim=1),
            all_assistant_mask=torch.cat(masks.padded(), dim=1),
            padded=True,
            batch_size=(len(masks.prompt),),
        )
    pairs = zip(masks.select("attention"), masks.full, strict=True)
    return _stack(
        policies.Masks(all_attention_mask=attention, all_assistant_mask=assistant, padded=False, batch_size=())
        for attention, assistant in pairs
    )


def text_to_torchrl(text: Text) -> Any:
    """Convert texts to torchrl's `Text`."""
    from torchrl.modules.llm import policies

    rows = zip(text.prompt, text.response, text.full, strict=True)
    return _stack(
        policies.Text(prompt=prompt, response=response, full=full, batch_size=()) for prompt, response, full in rows
    )


def chat_to_torchrl(history: ChatHistory) -> Any:
    """Convert chats to torchrl's `ChatHistory`, of role and content; either side of a row has at least one message.

    Raises:
        ValueError: a row has none, for which torchrl has no history.
    """
    from torchrl.data.llm import History
    from torchrl.modules.llm import policies

    for row in (*history.prompt, *history.response):
        if not row:
            raise ValueError("a row without messages: torchrl's History holds at least one")

    def histories(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
        return History.from_chats(
            [[{"role": message["role"], "content": message["content"]} for message in row] for row in rows]
        )

    return policies.ChatHistory(
        prompt=histories(history.prompt),
        response=histories(history.response),
        full=histories(history.full),
        batch_size=(len(history.prompt),),
    )


def tokens_from_torchrl(tokens: Any, masks: Any = None) -> Tokens:
    """Convert torchrl's `Tokens` to rows of ids.

    Raises:
        ValueError: they are padded and no torchrl `Masks` say where.
    """
    prompt, response = _from_torchrl(tokens, masks)
    return Tokens([row.long() for row in prompt], [row.long() for row in response])


def logprobs_from_torchrl(logprobs: Any, masks: Any = None) -> LogProbs:
    """Convert torchrl's `LogProbs` to rows, as `tokens_from_torchrl` does."""
    return LogProbs(*_from_torchrl(logprobs, masks))


def masks_from_torchrl(masks: Any, tokens: Any) -> Masks:
    """Convert torchrl's `Masks` to rows, which the `Tokens` beside them split into prompt and response."""
    prompts = [len(row) for row in tokens_from_torchrl(tokens, masks).prompt]
    attention = _rows(masks, "all_attention_mask")
    assistant = [
        row[kept.bool()].bool() for row, kept in zip(_rows(masks, "all_assistant_mask"), attention, strict=True)
    ]
    pairs = list(zip(assistant, prompts, strict=True))
    return Masks([row[:length] for row, length in pairs], [row[length:] for row, length in pairs])


def text_from_torchrl(text: Any) -> Text:
    """Convert torchrl's `Text` to rows."""
    return Text(list(text.prompt), list(text.response))


def chat_from_torchrl(history: Any) -> ChatHistory:
    """Convert torchrl's `ChatHistory` to rows, of role and content."""

    def conversations(rows: Any) -> list[list[dict[str, Any]]]:
        return [
            [{"role": message.role, "content": message.content} for message in row.unbind(0)] for row in rows.unbind(0)
        ]

    return ChatHistory(conversations(history.prompt), conversations(history.response))


def _to_torchrl(name: str, rows: Tokens | LogProbs, padded: tuple[Tensor, Tensor] | None) -> Any:
    from torchrl.modules.llm import policies

    container = getattr(policies, name)
    if padded is not None:
        prompt, response = padded
        return container(
            prompt=prompt,
            response=response,
            full=torch.cat(padded, dim=1),
            padded=True,
            batch_size=(len(prompt),),
        )
    triples = zip(rows.prompt, rows.response, rows.full, strict=True)
    return _stack(
        container(prompt=prompt, response=response, full=full, padded=False, batch_size=())
        for prompt, response, full in triples
    )


def _from_torchrl(rows: Any, masks: Any) -> tuple[list[Tensor], list[Tensor]]:
    prompt, response = (_rows(rows, name) for name in ("prompt", "response"))
    if not _is_padded(rows):
        return prompt, response
    if masks is None:
        raise ValueError("padded rows need the torchrl Masks beside them: ids alone cannot tell a token from padding")
    kept = [mask.bool() for mask in _rows(masks, "all_attention_mask")]
    width = prompt[0].shape[-1]
    return (
        [row[mask[:width]] for row, mask in zip(prompt, kept, strict=True)],
        [row[mask[width:]] for row, mask in zip(response, kept, strict=True)],
    )


def _rows(container: Any, name: str) -> list[Tensor]:
    rows = container.get(name) if _is_padded(container) else container.get(name, as_list=True)
    if rows is None:
        raise ValueError(f"torchrl's {type(container).__name__} has no {name}")
    return list(rows)


def _is_padded(container: Any) -> bool:
    flag = container.padded
    return all(flag) if isinstance(flag, Sequence) else bool(flag)


def _stack(rows: Any) -> Any:
    from tensordict import lazy_stack

    return lazy_stack(list(rows))
