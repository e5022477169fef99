"""Write prompts by the tokenizer's chat template, and refuse one that cannot write the conversations of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rlcanary.errors import UserError
from rlcanary.reference.data import rendering


def require_chat_template(tokenizer: Any) -> None:
    """Check that conversations can be rendered at all.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(f"the tokenizer {name} has no chat template, which conversations are written by: give it one")


def require_roles(tokenizer: Any, roles: Iterable[str]) -> None:
    """Check that the chat template writes messages of these roles; some leave out what they do not know.

    Raises:
        UserError: it refuses a role, or leaves it out.
    """
    texts = rendering.two_texts(tokenizer)
    asked, answered = ({"role": role, "content": texts[0]} for role in ("user", "assistant"))
    for role in roles:
        messages = [{"role": role, "content": text} for text in texts]
        one, other = ([each, asked] if role == "system" else [asked, answered, each] for each in messages)
        if prompt_ids(one, tokenizer) == prompt_ids(other, tokenizer):
            raise UserError(
                f"the chat template leaves out messages of the role {role!r}: use another role, such as user"
            )


def prompt_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Encode the policy's next prompt: the conversation so far and the header of the assistant's turn.

    Args:
        messages: messages of any role; sampled ones as `rlcanary.grpo.rollout.chat.sampled_message` makes them.
        tokenizer: with a chat template.

    Returns:
        The ids. They begin with those of every earlier prompt and its completion.

    Raises:
        UserError: the tokenizer has no chat template, or it refuses the conversation.
        ValueError: the template leaves out the end of an answer, or what it says.
    """
    require_chat_template(tokenizer)
    try:
        return rendering.prompt_ids(messages, tokenizer)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UserError(f"the chat template refuses a conversation of the roles {roles}: {error}") from error


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the id that ends an answer in the chat template; None without a template, or if it ends with no such id."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return rendering.end_of_turn(tokenizer)
    except (TemplateError, ValueError):
        return None
