"""Rendering a conversation to ids, with a flag per id for whether it is trained."""

import string
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
"""JSON schemas of the tools that the policy is offered."""

_OURS = ("sampled", "token_ids", "logprobs", "token_versions")


def render(
    messages: Sequence[Message], tokenizer: Any, tools: Tools = None, opens_turn: bool = False
) -> tuple[list[int], list[bool]]:
    """Render a conversation with the tokenizer's chat template -> its ids and, per id, whether this rollout sampled it.

    The tokens that a message was sampled as begin behind the generation prompt and end with the end-of-turn token
    (`end_of_turn`). Everything else is context: system, user and tool messages, earlier assistant messages, the template's
    headers and anything that it puts after an end-of-turn token.

    A conversation grows by appending. Where a template writes a turn anew once others follow, as some leave out its
    thoughts, the turn stays as it was sampled, or as the template wrote it while it was the last.

    Args:
        messages: dictionaries with role and content. Those with `"sampled": True` are trained; where they also have
            `"token_ids"`, these stand in the result as they are, and an end-of-turn token that is not among them is
            not trained.
        tokenizer: a transformers tokenizer with a chat template.
        tools: the tools that the template writes into the prompt.
        opens_turn: end with the header of the assistant's next turn.

    Returns:
        The ids, and a list of bool of the same length.

    Raises:
        ValueError: a sampled message is not one of the assistant; or the template ends it with no special token, leaves out
            what it says, or opens its turn otherwise than it writes it, so that its tokens cannot be found.
    """
    sampled = [index for index, message in enumerate(messages) if message.get("sampled")]
    for index in sampled:
        if (role := messages[index]["role"]) != "assistant":
            raise ValueError(f"message {index} is marked as sampled and has the role {role!r}")
    ids = _template(messages[: sampled[0]] if sampled else messages, tokenizer, tools, bool(sampled) or opens_turn)
    trained = [False] * len(ids)
    for index, following in pairwise([*sampled, len(messages)]):
        message = messages[index]
        behind = _behind(messages[:following], index, tokenizer, tools, opens_turn or following < len(messages))
        own = list(message["token_ids"] if "token_ids" in message else _turn(messages[: index + 1], tokenizer, tools))
        # A turn that was truncated has no end of its own: the one that follows is the template's.
        rest = behind[_overlap(own, behind, tokenizer) :]
        ids += own + rest
        trained += [True] * len(own) + [False] * len(rest)
    return ids, trained


def prompt_ids(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Encode the policy's next prompt: the conversation so far and the header of the assistant's turn.

    Args:
        messages: as for `render`; sampled ones with their `token_ids`.
        tokenizer: a transformers tokenizer with a chat template.

    Returns:
        The ids. They begin with those of every earlier prompt and its completion.

    Raises:
        ValueError: as for `render`.
    """
    return render(messages, tokenizer, opens_turn=True)[0]


def end_of_turn(tokenizer: Any) -> int:
    """Return the first special token that the chat template writes behind an answer. It need not be the tokenizer's EOS.

    Raises:
        ValueError: the template writes none.
    """
    text, _ = two_texts(tokenizer)
    return _behind([{"role": "user", "content": text}, {"role": "assistant", "content": text}], 1, tokenizer, None)[0]


def two_texts(tokenizer: Any) -> tuple[str, str]:
    """Return two characters that the tokenizer tells apart, for probes of its template.

    Raises:
        ValueError: it knows fewer.
    """
    unknown = tokenizer.unk_token_id
    known = (each for each in string.printable if unknown not in tokenizer.encode(each, add_special_tokens=False))
    texts = tuple(islice(known, 2))
    if len(texts) < 2:
        raise ValueError("the tokenizer knows no two printable characters")
    return texts[0], texts[1]


def _turn(messages: Sequence[Message], tokenizer: Any, tools: Tools) -> list[int]:
    """Return the ids of the last message behind the header of its turn, with its end-of-turn token."""
    index = len(messages) - 1
    before = _template(messages[:index], tokenizer, tools, opens_turn=True)
    through = _template(messages, tokenizer, tools)
    if through[: len(before)] != before:
        raise ValueError(
            f"the chat template opens the turn of message {index} otherwise than it writes it: its tokens are only known "
            "where the message has its token_ids"
        )
    return through[len(before) : len(through) - len(_behind(messages, index, tokenizer, tools)) + 1]


def _behind(
    messages: Sequence[Message], index: int, tokenizer: Any, tools: Tools, opens_turn: bool = False
) -> list[int]:
    """Return all ids from the end-of-turn token of a message on: those that stay when it says something else."""

    def saying(content: str) -> list[int]:
        changed = [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
        return _template(changed, tokenizer, tools, opens_turn)

    ids, others = map(saying, two_texts(tokenizer))
    if ids == others:
        raise ValueError(f"the chat template leaves out what message {index} says when later messages follow")
    common = 0
    while ids[-1 - common] == others[-1 - common]:
        common += 1
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    behind = ids[len(ids) - common :]
    ends = [place for place, token in enumerate(behind) if token in added.union(tokenizer.all_special_ids)]
    if not ends:
        raise ValueError(f"the chat template does not end message {index} with a special token, such as the EOS")
    return behind[ends[0] :]


def _overlap(own: list[int], behind: list[int], tokenizer: Any) -> int:
    """Count the first ids of `behind` that stand at the end of a sampled turn, where another end stands for the first."""
    for count in range(min(len(own), len(behind)), 0, -1):
        if own[-count:] == behind[:count]:
            return count
    return int(bool(own) and own[-1] in (tokenizer.eos_token_id, end_of_turn(tokenizer)))


def _template(messages: Sequence[Message], tokenizer: Any, tools: Tools = None, opens_turn: bool = False) -> list[int]:
    # A template might write out the fields that only say how a message was sampled.
    plain = [{name: value for name, value in message.items() if name not in _OURS} for message in messages]
    ids = tokenizer.apply_chat_template(
        plain, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=opens_turn
    )
    return list(ids)
