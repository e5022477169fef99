"""Build the items of a run: the plan's datasets, rendered by the tokenizer, each with the verifier of its row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.data import datasets
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.items import ItemIterator, Order, fixed
from rlcanary.grpo.data.templates import prompt_ids, require_roles
from rlcanary.grpo.plan.plan import DataSettings, EvaluationSettings
from rlcanary.grpo.rewards.verifier import Verifier


def load_rows(settings: Sequence[Mapping[str, Any]], key: str = "data.datasets") -> dict[str, list[Row]]:
    """Load the rows of each dataset, by its name; `key` is their place in the plan.

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


def item_iterator(
    data: DataSettings,
    tokenizer: Any,
    verifiers: Mapping[str, Verifier],
    *,
    seed: int,
    as_rows: bool = False,
    most_in_flight: int | None = None,
) -> ItemIterator[Any]:
    """Build the iterator over the items to train on, none dealt out yet; `as_rows` leaves them unrendered.

    Raises:
        UserError: a dataset is unknown, a verifier is missing, the tokenizer has no chat template where one is needed, or
            a mixture is invalid.
    """
    rows = datasets.join(load_rows(data.datasets))
    items = _items(rows, "data.datasets", data, tokenizer, verifiers, as_rows)
    ids = datasets.ids_of(rows)
    if data.order is not None:
        return ItemIterator(items, _order(data.order, {row.id for row in rows}), most_in_flight=most_in_flight)
    try:
        if data.mixing == "weighted":
            weights = dict.fromkeys(ids, 1.0) if data.weights is None else data.weights
            order = datasets.weighted(ids, weights, seed)
        else:
            order = datasets.in_sequence(ids, data.weights, seed)
    except UserError as error:
        raise UserError(f"data.weights: {error}") from error
    return ItemIterator(items, order, most_in_flight=most_in_flight)


def _order(path: Path, known: set[str]) -> Order:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.order: cannot read {path}: {error}") from error
    ids = [line.strip() for line in lines if line.strip()]
    if repeated := [id for id, count in Counter(ids).items() if count > 1]:
        raise UserError(f"data.order: {path} has {repeated[0]!r} more than once")
    if unknown := [id for id in ids if id not in known]:
        raise UserError(f"data.order: {path} has {unknown[0]!r}, which no row has; there is {min(known)!r}")
    if not ids:
        raise UserError(f"data.order: {path} has no id")
    return fixed(ids)


def evaluation_iterator(
    evaluation: EvaluationSettings,
    data: DataSettings,
    tokenizer: Any,
    verifiers: Mapping[str, Verifier],
    *,
    as_rows: bool = False,
) -> ItemIterator[Any]:
    """Build the iterator over the evaluation items, all of them in every epoch and rendered as the training items are.

    Raises:
        UserError: as `item_iterator`.
    """
    key = "evaluation.datasets"
    rows = datasets.join(load_rows(evaluation.datasets, key))
    return ItemIterator(_items(rows, key, data, tokenizer, verifiers, as_rows))


def _items(
    rows: Sequence[Row],
    key: str,
    data: DataSettings,
    tokenizer: Any,
    verifiers: Mapping[str, Verifier],
    as_rows: bool,
) -> Sequence[Any]:
    rows = [replace(row, answer_prefix=data.answer_prefix) if row.answer_prefix is None else row for row in rows]
    encode = _encoder(data, tokenizer)
    if data.chat_template:
        roles = {message["role"] for row in rows for message in row.messages(data.system_prompt)}
        try:
            require_roles(tokenizer, roles & {"system"})
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    for row in rows:
        if row.verifier not in verifiers:
            raise UserError(
                f"{key}: {row.id} asks for the verifier {row.verifier!r}, there are {', '.join(sorted(verifiers))}"
            )
        if as_rows and row.answer_prefix:
            raise UserError(
                f"{key}: {row.id} has an answer_prefix, but conversations of an environment begin no answer: leave it out"
            )
        _require_known(row, encode, key, data, tokenizer)
    if as_rows:
        return rows
    return [datasets.to_item(row, encode, verifiers[row.verifier]) for row in rows]


def _require_known(
    row: Row, encode: Callable[[Row], Sequence[int]], key: str, data: DataSettings, tokenizer: Any
) -> None:
    """Refuse a prompt of which the tokenizer would write something as padding, as the one over characters does."""
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    if unknown_id is not None and unknown_id == tokenizer.pad_token_id and unknown_id in encode(row):
        texts = [row.answer_prefix or "", *(message["content"] for message in row.messages(data.system_prompt))]
        unknown = sorted({each for text in texts for each in text if unknown_id in tokenizer.encode(each)})
        raise UserError(
            f"{key}: the prompt of {row.id} has {' '.join(map(repr, unknown))}, which the tokenizer does not know and would "
            "write as padding: add it to model.scratch.characters"
        )


def _encoder(settings: DataSettings, tokenizer: Any) -> Any:
    if not settings.chat_template:
        return lambda row: tokenizer(_plain(row, settings), add_special_tokens=False)["input_ids"]
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template: give it one, or set data.chat_template to "
            "false to encode the bare text of the prompts"
        )
    return lambda row: (
        prompt_ids(row.messages(settings.system_prompt), tokenizer)
        + tokenizer.encode(row.answer_prefix or "", add_special_tokens=False)
    )


def _plain(row: Row, settings: DataSettings) -> str:
    if not isinstance(row.prompt, str):
        raise UserError(f"{row.id} is a conversation, which needs data.chat_template")
    own = settings.system_prompt if row.system_prompt is None else row.system_prompt
    return own + row.prompt + (row.answer_prefix or "")
