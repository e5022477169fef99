"""The items of a run: the plan's datasets, rendered by the tokenizer, each with the verifier that its rows ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo import datasets
from rlcanary.grpo.datasets import Row
from rlcanary.grpo.environment import ChatEnvironment, Tool
from rlcanary.grpo.items import ItemIterator
from rlcanary.grpo.plan import DataSettings, Plan
from rlcanary.grpo.python_tool import PythonTool
from rlcanary.grpo.rewards.verifier import Verifier

TOOLS: dict[str, Callable[..., Tool]] = {"python": PythonTool}


def load_rows(settings: Sequence[Mapping[str, Any]], key: str = "data.datasets") -> dict[str, list[Row]]:
    """The rows of each dataset, by its name; `key` is where they stand in the plan.

    Raises:
        UserError: an unknown dataset or option, named by its key.
    """
    rows: dict[str, list[Row]] = {}
    for index, given in enumerate(settings):
        options = dict(given)
        name = options.pop("name")
        try:
            loaded = datasets.load(name, **options)
        except UserError as error:
            raise UserError(f"{key}[{index}]: {error}") from error
        if name in rows:
            raise UserError(f"{key}[{index}].name is {name!r}, which an earlier dataset has")
        rows[name] = loaded
    return rows


def item_iterator(plan: Plan, tokenizer: Any, verifiers: Mapping[str, Verifier]) -> ItemIterator[Any]:
    """The items of a plan in their order, none of them dealt out yet; with an environment they are the rows themselves.

    Raises:
        UserError: a dataset is unknown, a verifier is missing, the tokenizer has no chat template where one is needed, or
            a mixture makes no sense.
    """
    rows = datasets.join(load_rows(plan.data.datasets))
    items = _items(plan, rows, "data.datasets", tokenizer, verifiers)
    ids = datasets.ids_of(rows)
    try:
        if plan.data.mixing == "weighted":
            order = datasets.weighted(ids, plan.data.weights or dict.fromkeys(ids, 1.0), plan.run.seed)
        else:
            order = datasets.in_sequence(ids, plan.data.weights, plan.run.seed)
    except UserError as error:
        raise UserError(f"data.weights: {error}") from error
    return ItemIterator(items, order, most_in_flight=plan.schedule.prompts_ahead or None)


def evaluation_iterator(plan: Plan, tokenizer: Any, verifiers: Mapping[str, Verifier]) -> ItemIterator[Any]:
    """The items of the evaluation of a plan that has one, all of them in every epoch.

    Raises:
        UserError: as `item_iterator`.
    """
    assert plan.evaluation is not None
    key = "evaluation.datasets"
    rows = datasets.join(load_rows(plan.evaluation.datasets, key))
    return ItemIterator(_items(plan, rows, key, tokenizer, verifiers))


def _items(
    plan: Plan, rows: Sequence[Row], key: str, tokenizer: Any, verifiers: Mapping[str, Verifier]
) -> Sequence[Any]:
    encode = _encoder(plan.data, tokenizer)
    for row in rows:
        if row.verifier not in verifiers:
            raise UserError(
                f"{key}: {row.id} asks for the verifier {row.verifier!r}, there are {', '.join(sorted(verifiers))}"
            )
    if plan.environment:
        return rows
    return [datasets.to_item(row, encode, verifiers[row.verifier]) for row in rows]


def chat_environment(
    plan: Plan, items: ItemIterator[Row], tokenizer: Any, verifiers: Mapping[str, Verifier]
) -> ChatEnvironment:
    """The environment of a plan that has one, on its items.

    Raises:
        UserError: an unknown tool or option, or turns that do not suffice.
    """
    settings = plan.environment
    assert settings is not None
    tools = []
    for name, options in settings.tools.items():
        if name not in TOOLS:
            raise UserError(f"environment.tools: no tool {name}; there are {', '.join(TOOLS)}")
        try:
            tools.append(TOOLS[name](**(options or {})))
        except (TypeError, UserError) as error:
            raise UserError(f"environment.tools.{name}: {error}") from error
    try:
        return ChatEnvironment(
            list(items.items.values()),
            tokenizer,
            verifiers,
            system_prompt=plan.data.system_prompt,
            tools=tools,
            max_turns=settings.max_turns,
            tool_role=settings.tool_role,
        )
    except UserError as error:
        raise UserError(f"environment: {error}") from error


def _encoder(settings: DataSettings, tokenizer: Any) -> Any:
    if not settings.chat_template:
        return lambda row: tokenizer(_plain(row, settings), add_special_tokens=False)["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template: give it one, or set data.chat_template to "
            "false to encode the bare text of the prompts"
        )
    return lambda row: tokenizer.apply_chat_template(
        row.messages(settings.system_prompt), add_generation_prompt=True, return_dict=False
    )


def _plain(row: Row, settings: DataSettings) -> str:
    if not isinstance(row.prompt, str):
        raise UserError(f"{row.id} is a conversation, which needs data.chat_template")
    return settings.system_prompt + row.prompt
