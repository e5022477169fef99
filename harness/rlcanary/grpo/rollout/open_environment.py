"""Open the chat environment that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.plan.options import require_types
from rlcanary.grpo.plan.plan import EnvironmentSettings
from rlcanary.grpo.rewards.verifier import Verifier
from rlcanary.grpo.rollout.environment import ChatEnvironment, Tool
from rlcanary.grpo.tools.python_tool import PythonTool

TOOLS: dict[str, Callable[..., Tool]] = {"python": PythonTool}


def chat_environment(
    settings: EnvironmentSettings,
    items: ItemIterator[Row],
    tokenizer: Any,
    verifiers: Mapping[str, Verifier],
    system_prompt: str = "",
) -> ChatEnvironment:
    """Open the environment of a plan on its items.

    Raises:
        UserError: an unknown tool or option, or turns that do not suffice.
    """
    tools = []
    for name, options in settings.tools.items():
        if name not in TOOLS:
            raise UserError(f"environment.tools: no tool {name}; there are {', '.join(TOOLS)}")
        given = {} if options is None else options
        try:
            require_types(TOOLS[name], given)
            tools.append(TOOLS[name](**given))
        except UserError as error:
            raise UserError(f"environment.tools.{name}: {error}") from error
    try:
        return ChatEnvironment(
            list(items.items.values()),
            tokenizer,
            verifiers,
            system_prompt=system_prompt,
            tools=tools,
            max_turns=settings.max_turns,
            tool_role=settings.tool_role,
        )
    except UserError as error:
        raise UserError(f"environment: {error}") from error
