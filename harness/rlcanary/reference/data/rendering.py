"""Rendering a conversation to ids, with a flag per id for whether it is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools that the policy is offered."""

_OURS = ("sampled", "token_ids", "logprobs", "token_versions")


def render(messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Tools = None) -> tuple[list[int], list[bool]]:
    """Render a conversation with the tokenizer's chat template -> its ids and, per id, whether this rollout sampled it.

    The tokens that a message was sampled as begin behind the generation prompt and end with the end-of-turn token, which
    is the tokenizer's EOS. Everything else is context: system, user and tool messages, earlier assistant messages, the
    template's headers and anything that it puts after an end-of-turn token.

    Args:
        messages: dictionaries with role and content. Those with `"sampled": True` are trained; where they also have
            `"token_ids"`, these stand in the result as they are, and an end-of-turn token that is not among them is
            not trained.
        tokenizer: a transformers tokenizer with a chat template.
        tools: the tools that the template writes into the prompt.

    Returns:
        The ids, and a list of bool of the same length.

    Raises:
        ValueError: a sampled message is not one of the assistant; or the template writes earlier turns differently once
            a later one is there, so that the sampled tokens cannot be found.
    """
    whole = _template(messages, tokenizer, tools)
    ids: list[int] = []
    trained: list[bool] = []
    done = 0
    for index, message in enumerate(messages):
        if not message.get("sampled"):
            continue
        if message["role"] != "assistant":
            raise ValueError(f"message {index} is marked as sampled and has the role {message['role']!r}")
        start, end = _span(messages[: index + 1], whole, tokenizer, tools)
        sampled = list(message.get("token_ids", whole[start:end]))
        ids += whole[done:start] + sampled
        trained += [False] * (start - done) + [True] * len(sampled)
        # A turn that was truncated has no end of its own: the one that follows is the template's.
        done = end if sampled and sampled[-1] == tokenizer.eos_token_id else end - 1
    return ids + whole[done:], trained + [False] * (len(whole) - done)


def prompt_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Encode the policy's next prompt: the conversation so far and the header of the assistant's turn.

    Args:
        messages: as for `render`; sampled ones with their `token_ids`.
        tokenizer: a transformers tokenizer with a chat template.

    Returns:
        The ids. They begin with those of every earlier prompt and its completion.

    Raises:
        ValueError: the template writes the conversation differently once a turn follows.
    """
    so_far, opened = (_template(messages, tokenizer, opens_turn=each) for each in (False, True))
    if opened[: len(so_far)] != so_far:
        raise ValueError(
            "the chat template writes the conversation differently when the assistant's next turn is opened"
        )
    return render(messages, tokenizer)[0] + opened[len(so_far) :]


def _span(messages: Sequence[Mapping[str, Any]], whole: list[int], tokenizer: Any, tools: Tools) -> tuple[int, int]:
    """Start and end of the last of these messages in the ids of the whole conversation, with its end-of-turn token."""
    before = _template(messages[:-1], tokenizer, tools, opens_turn=True)
    through = _template(messages, tokenizer, tools)
    if through[: len(before)] != before or whole[: len(through)] != through:
        raise ValueError(
            f"the chat template writes the conversation up to message {len(messages) - 1} differently when later messages "
            "follow: its tokens cannot be told from the template's"
        )
    behind = [position for position in range(len(before), len(through)) if through[position] == tokenizer.eos_token_id]
    if not behind:
        raise ValueError(f"the chat template does not end message {len(messages) - 1} with the tokenizer's EOS")
    return len(before), behind[-1] + 1


def _template(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Tools = None, opens_turn: bool = False
) -> list[int]:
    # A template might write out the fields that only say how a message was sampled.
    plain = [{name: value for name, value in message.items() if name not in _OURS} for message in messages]
    ids = tokenizer.apply_chat_template(
        plain, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=opens_turn
    )
    return list(ids)
