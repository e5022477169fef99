"""Load tasks: generated ones that need no download, JSON lines from a file, and several datasets in one order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlcanary.contract.adapter import Item
from rlcanary.errors import UserError
from rlcanary.grpo.data.items import Order, shuffled
from rlcanary.grpo.plan.options import require_types
from rlcanary.grpo.rewards.verifier import Reward, Verifier

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One task.

    Attributes:
        id: identifies it among all rows of a run.
        prompt: the user's message, or a conversation so far.
        target: the value that the verifier compares with.
        verifier: the type of verifier that understands the target.
        dataset: name of its dataset.
        system_prompt: system prompt of the row; None is the run's, "" is none at all.
        answer_prefix: beginning of the answer, likewise, which the policy continues and the verifier sees too.
    """

    id: str
    prompt: str | Sequence[Message]
    target: Any
    verifier: str = "exact"
    dataset: str = "unknown"
    system_prompt: str | None = None
    answer_prefix: str | None = None

    def messages(self, system_prompt: str = "") -> list[Message]:
        """Build the conversation, after the row's own system prompt or, if it has none, the run's."""
        own = system_prompt if self.system_prompt is None else self.system_prompt
        asked: Sequence[Message]
        asked = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return [{"role": "system", "content": own}, *asked] if own else [*asked]


def to_item(row: Row, encode: Callable[[Row], Sequence[int]], verifier: Verifier) -> Item:
    """Build the sampler's item; its reward asks the verifier, with `row.target` unchanged."""
    return Item(row.id, encode(row), Reward(verifier, row.target, row.answer_prefix or ""))


def arithmetic(
    count: int = 100, seed: int = 0, *, largest: int = 9, operations: str = "+", name: str = "arithmetic"
) -> list[Row]:
    """Generate sums such as "3+4=" with the target "7", as `ExactVerifier` scores them.

    The same arguments give the same rows. A problem is drawn again rather than repeated, as long as there are others.

    Args:
        count: number of rows.
        seed: seed of the numbers.
        largest: bound of the two numbers.
        operations: some of "+", "-" and "*"; differences are never negative.
        name: name of the dataset in its rows.

    Raises:
        UserError: an operation is not one of these, or the numbers make no problem.
    """
    if not operations or set(operations) - set("+-*"):
        raise UserError(f"operations {operations!r} are not some of +-*")
    if largest < 0 or count < 1:
        raise UserError(f"no problems of count={count} and largest={largest}")

    def problem(source: random.Random) -> tuple[str, str]:
        a, b = source.randint(0, largest), source.randint(0, largest)
        operation = source.choice(operations)
        if operation == "-":
            a, b = max(a, b), min(a, b)
        return f"{a}{operation}{b}=", str({"+": a + b, "-": a - b, "*": a * b}[operation])

    return _drawn(problem, count, seed, name)


# The function of a string task, by the word in its prompt.
STRING_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "first": lambda text: text[0],
    "last": lambda text: text[-1],
}


def strings(
    count: int = 100,
    seed: int = 0,
    *,
    tasks: Sequence[str] = tuple(STRING_TASKS),
    letters: str = "abcdefgh",
    longest: int = 4,
    name: str = "strings",
) -> list[Row]:
    """Generate tasks on letters such as "reverse abc=" with the target "cba", as `ExactVerifier` scores them.

    Raises:
        UserError: there is no such task, no letter or no length.
    """
    if not tasks or set(tasks) - set(STRING_TASKS):
        raise UserError(f"tasks {', '.join(tasks) or 'none'} are not some of {', '.join(STRING_TASKS)}")
    if not letters or longest < 1 or count < 1:
        raise UserError(f"no strings of count={count}, letters={letters!r} and longest={longest}")

    def problem(source: random.Random) -> tuple[str, str]:
        text = "".join(source.choices(letters, k=source.randint(1, longest)))
        task = source.choice(list(tasks))
        return f"{task} {text}=", STRING_TASKS[task](text)

    return _drawn(problem, count, seed, name)


def load_jsonl(path: Path, name: str | None = None) -> list[Row]:
    """Load the rows of a file with one JSON object per line, which has the fields of `Row` or those of a published dataset.

    Raises:
        UserError: the file cannot be read or holds nothing; a line is not such an object, lacks id, prompt or target, or
            repeats an id. The line is named; no row is ever left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the dataset {path}: {error}") from error
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _parse(line, number, f"{path}, line {number}", name or path.stem)
            if row.id in rows:
                raise UserError(f"{path}, line {number}: the id {row.id!r} is taken by an earlier line")
            rows[row.id] = row
    if not rows:
        raise UserError(f"the dataset {path} is empty")
    return list(rows.values())


GENERATED: dict[str, Callable[..., list[Row]]] = {"arithmetic": arithmetic, "strings": strings}


def load(name: str, **options: Any) -> list[Row]:
    """Load the generated dataset of this name, or the rows of a `.jsonl` file.

    Raises:
        UserError: no such dataset, file or option.
    """
    if name.endswith(".jsonl"):
        if set(options) - {"name"}:
            raise UserError(f"the dataset {name} is a file, which takes no options but a name: {', '.join(options)}")
        return load_jsonl(Path(name), **options)
    if name not in GENERATED:
        raise UserError(f"unknown dataset {name!r}: neither a .jsonl file nor one of {', '.join(GENERATED)}")
    try:
        require_types(GENERATED[name], options)
    except UserError as error:
        raise UserError(f"dataset {name}: {error}") from error
    return GENERATED[name](**options)


def join(datasets: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Join all rows, with ids that begin with the name of their dataset, so that no two datasets share one."""
    return [replace(row, id=f"{name}/{row.id}", dataset=name) for name, rows in datasets.items() for row in rows]


def ids_of(rows: Iterable[Row]) -> dict[str, list[Hashable]]:
    """Return the ids of joined rows by dataset, which `weighted` and `in_sequence` order."""
    ids: dict[str, list[Hashable]] = {}
    for row in rows:
        ids.setdefault(row.dataset, []).append(row.id)
    return ids


def weighted(datasets: Mapping[str, Sequence[Hashable]], weights: Mapping[str, float], seed: int = 0) -> Order:
    """Draw each next id from a dataset by weight, every id once per epoch.

    Once a dataset is used up, the others share its weight in proportion.

    Raises:
        UserError: weights and datasets differ in their names, or a weight is not positive.
    """
    _same_names(datasets, weights, "weight")
    wrong = {name: weight for name, weight in weights.items() if not 0 < weight < float("inf")}
    if wrong:
        raise UserError(f"a weight has to be positive and finite: {wrong}")

    def order(epoch: int) -> list[Hashable]:
        source = random.Random(f"{seed}/{epoch}")
        left = {name: iter(shuffled(ids, _seed(seed, name))(epoch)) for name, ids in datasets.items()}
        mixed: list[Hashable] = []
        while left:
            name = source.choices(list(left), [weights[name] for name in left])[0]
            following = next(left[name], None)
            if following is None:
                del left[name]
            else:
                mixed.append(following)
        return mixed

    return order


def in_sequence(
    datasets: Mapping[str, Sequence[Hashable]], counts: Mapping[str, float] | None = None, seed: int = 0
) -> Order:
    """Order one dataset after another, each in an order of the epoch's own, and of each the first `counts` ids.

    Raises:
        UserError: counts and datasets differ in their names, or a count is no whole number from 1 to the size.
    """
    counts = {name: len(ids) for name, ids in datasets.items()} if counts is None else counts
    _same_names(datasets, counts, "count")
    for name, count in counts.items():
        if count not in range(1, len(datasets[name]) + 1):
            raise UserError(
                f"count {count} of dataset {name} is no whole number between 1 and its {len(datasets[name])} rows"
            )

    def order(epoch: int) -> list[Hashable]:
        parts = {name: shuffled(ids, _seed(seed, name))(epoch) for name, ids in datasets.items()}
        return [id for name, ids in parts.items() for id in ids[: int(counts[name])]]

    return order


def _seed(seed: int, name: str) -> int:
    """Derive a seed per dataset, so that datasets of one size are not shuffled alike."""
    return random.Random(f"{seed}/{name}").randrange(2**31)


def _same_names(datasets: Mapping[str, Any], given: Mapping[str, Any], what: str) -> None:
    if not datasets or any(not ids for ids in datasets.values()):
        raise UserError(f"there is no dataset, or one is empty: { {name: len(ids) for name, ids in datasets.items()} }")
    if set(given) != set(datasets):
        raise UserError(f"a {what} is needed for each of {', '.join(datasets)}, and was given for {', '.join(given)}")


def _drawn(problem: Callable[[random.Random], tuple[str, str]], count: int, seed: int, name: str) -> list[Row]:
    source = random.Random(f"{name}/{seed}")
    seen: set[str] = set()
    rows = []
    for index in range(count):
        for _ in range(20):
            prompt, target = problem(source)
            if prompt not in seen:
                break
        seen.add(prompt)
        rows.append(Row(f"{name}-{index}", prompt, target, dataset=name))
    return rows


def _as_published(values: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Translate a row of GSM8K, IFEval, RLVR (allenai/RLVR-GSM, -MATH, -IFeval), HumanEval or MBPP; others stay."""
    id, verifier = number, "code"
    target: Any
    match values:
        case {"question": prompt, "answer": target, **rest} if not rest:
            verifier = "gsm8k"
        case {"key": id, "prompt": prompt, "instruction_id_list": names, "kwargs": kwargs, **rest} if not rest:
            target, verifier = {"instruction_id_list": names, "kwargs": kwargs}, "ifeval"
        case {"messages": prompt, "ground_truth": target, "dataset": source, **rest} if rest.keys() <= RLVR:
            verifier = str(source).lower()
        case {"task_id": id, "prompt": prompt, "entry_point": name, "test": test, **rest} if set(rest) == HUMANEVAL:
            target = [test, f"check({name})"]
        case {"task_id": id, "code": _, "test_list": tests, **rest} if rest.keys() <= MBPP:
            target = [*(rest.get("test_imports") or ()), rest.get("test_setup_code") or "", *tests]
            # The task alone does not name the function.
            prompt = "\n".join([rest.get("text") or rest["prompt"], "Your code should pass these tests:", *tests])
        case _:
            return values
    return {"id": id, "prompt": prompt, "target": target, "verifier": verifier}


# The other fields of rows; of MBPP `prompt` and what follows it are those of its sanitized rows.
HUMANEVAL = {"canonical_solution"}
RLVR = {"constraint_type", "constraint"}
MBPP = {"text", "test_setup_code", "challenge_test_list", "prompt", "source_file", "test_imports"}


def _parse(line: str, number: int, where: str, dataset: str) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a row is an object, not {line.strip()[:40]}")
    values = _as_published(values, number)
    missing = [key for key in ("id", "prompt", "target") if values.get(key) in (None, "")]
    if missing:
        raise UserError(f"{where}: the row lacks {', '.join(missing)}")
    unknown = set(values) - {field.name for field in fields(Row)}
    if unknown:
        raise UserError(f"{where}: a row has no field {', '.join(sorted(unknown))}")
    return Row(**{"dataset": dataset, **values, "id": str(values["id"])})
