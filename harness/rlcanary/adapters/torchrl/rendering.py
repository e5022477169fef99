"""torchrl's `History`, which renders conversations with the mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.contract.adapter import NotProvided


class Rendering(TorchrlBase):
    """Conversations as ids."""

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        from tensordict import set_list_to_stack
        from torchrl.data.llm import History

        if any("token_ids" in message for message in messages):
            raise NotProvided("a History renders text")
        if any(message["role"] == "assistant" and not message.get("sampled") for message in messages):
            raise NotProvided("the mask is of all assistant messages")
        with quiet(), set_list_to_stack(True):
            rendered = History.from_chats(plain_messages(messages)).apply_chat_template(
                tokenizer=tokenizer,
                add_generation_prompt=False,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **({} if tools is None else {"tools": list(tools)}),
            )
        return rendered["input_ids"].tolist(), rendered["assistant_masks"].bool().tolist()


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of messages that torchrl's record of a conversation has."""
    return [{"role": each["role"], "content": each["content"]} for each in messages]
