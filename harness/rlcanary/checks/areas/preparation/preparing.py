"""Preparing: each row of a dataset is kept, held out or dropped for a reason, with its own prompt and reference."""

import copy
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, get_args

from rlcanary.checks.asserts import assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions, PromptStyle
from rlcanary.contract.records.preparation import DataRow, PreparationOptions, PreparedData, PreparedRow
from rlcanary.tiny_models import tiny_chat_tokenizer

NEEDS = ("prepare",)
DEFAULT = PreparationOptions()


def _asked(id: Hashable, prompt: str, reference: str, dataset: str = "sums", system: str = "") -> DataRow:
    messages = [{"role": "system", "content": system}] if system else []
    return DataRow(id, [*messages, {"role": "user", "content": prompt}], reference, dataset)


HISTORY = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "five"}]
# Some have more letters than tokens, others fewer.
ROWS = [
    _asked("a", "2+2?", "4"),
    _asked("b", "hello hello hello hello", "0"),
    _asked("c", "é ∑ 你好", "∑", "signs"),
    _asked("d", "2+2=?", "4.0", "sums", "be brief"),
    DataRow("e", [*HISTORY, {"role": "user", "content": "sure?"}], "yes", "signs"),
    _asked("f", "user assistant system", "no", "words"),
]
MANY = [_asked(number, f"{number}+1?", str(number + 1), "sums" if number % 3 else "thirds") for number in range(12)]


def _prepared(adapter: Adapter, rows: list[DataRow], options: PreparationOptions) -> PreparedData:
    """Prepare a copy of the rows, and assert that each is in one part of the result, with its own reference and dataset."""
    data: PreparedData = adapter.prepare(copy.deepcopy(rows), tiny_chat_tokenizer(), options)
    parts = [*(row.id for row in (*data.kept, *data.held_out)), *(data.dropped or {})]
    given = {row.id: row for row in rows}
    repeated = [id for id, count in Counter(parts).items() if count > 1]
    assert_equal(repeated, [], "rows are in the result more than once")
    assert_equal([id for id in parts if id not in given], [], "rows are in the result that were not given")
    if data.dropped is not None:
        assert_equal([id for id in given if id not in parts], [], "rows are neither kept nor held out nor dropped")
    for row in (*data.kept, *data.held_out):
        own = given[row.id]
        told = f"row {row.id!r} has another row's reference or dataset"
        assert_equal((row.reference, row.dataset), (own.reference, own.dataset), told)
    return data


def _names(rows: Any) -> list[Hashable]:
    return [row.id for row in rows]


def _ids(data: PreparedData) -> dict[Hashable, list[int]]:
    return {row.id: [int(token) for token in row.prompt_ids] for row in (*data.kept, *data.held_out)}


def _some() -> Iterator[Case]:
    yield Case("1 row", rows=ROWS[:1])
    yield Case("6 rows", rows=ROWS)
    yield Case("6 rows, backwards", rows=ROWS[::-1])
    yield Case("ids that are numbers", rows=MANY)
    yield Case("130 rows", rows=[_asked(number, f"{number}+1?", str(number + 1)) for number in range(130)])


@check("preparing.rows_as_given", needs=NEEDS, cases=_some)
def rows_as_given(adapter: Adapter, rows: list[DataRow]) -> None:
    """Without options every row is kept, in the given order, each with its own reference and dataset.

    Silent because a dataset that is a little smaller, or whose answers belong to the next prompts, trains as well; it only
    never gets good. Look for rows with a falsy reference that are filtered out, for columns that are filtered or sorted
    apart from each other, and for several rows that are made of one.
    """
    data = _prepared(adapter, rows, DEFAULT)
    assert_equal(_names(data.kept), _names(rows), "without options other rows are kept, or in another order")


def _prompts() -> Iterator[Case]:
    for system in ("", "be brief", "answer in French"):
        yield Case(f"system prompt {system!r}", rows=ROWS, system=system)
    for style in get_args(PromptStyle):
        changes = {"prompt_style": style}
        yield Case(changes, changes=changes, rows=ROWS, system="")


@check(
    "preparing.prompt_is_the_template",
    needs=NEEDS,
    cases=_prompts,
    applies=lambda declared: None if declared.prompt_style else "prompts are written in a way of their own",
)
def prompt_is_the_template(adapter: Adapter, rows: list[DataRow], system: str) -> None:
    """A prompt has the ids of the tokenizer's chat template, with the system prompt, up to where the assistant begins.

    Silent because a model answers any text: without its template, its system prompt or the assistant's header, or with BOS
    twice, it is trained on another prompt than it is evaluated and used on. Look for a templated text that is encoded
    with `add_special_tokens=True`, for a system prompt that is stored and never added, and for a missing
    `add_generation_prompt=True`. With `prompt_style="raw"` the ids are those of the text of a single message.
    """
    is_raw = adapter.conventions.prompt_style == "raw"
    tokenizer, data = tiny_chat_tokenizer(), _prepared(adapter, rows, PreparationOptions(system_prompt=system))
    prompts = _ids(data)
    for row in rows:
        has_own = row.messages[0]["role"] == "system"
        messages = [*([{"role": "system", "content": system}] if system and not has_own else []), *row.messages]
        if not is_raw:
            expected = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert_equal(prompts.get(row.id), list(expected), f"the prompt of row {row.id!r} is not the template's")
        elif len(messages) == 1:
            expected = tokenizer.encode(messages[0]["content"])
            assert_equal(prompts.get(row.id), list(expected), f"the prompt of row {row.id!r} is not its text")


def _alone() -> Iterator[Case]:
    yield Case(rows=ROWS)


@check("preparing.rows_are_separate", needs=NEEDS, cases=_alone)
def rows_are_separate(adapter: Adapter, rows: list[DataRow]) -> None:
    """A row has the same prompt alone as among others.

    Silent because the ids are those of the row but for what the others added: padding up to the longest prompt of a batch,
    or the system prompt of the row before. Look for `padding=True` in a batched map, and for lists that rows share.
    """
    prompts = _ids(_prepared(adapter, rows, DEFAULT))
    for row in rows:
        alone = _ids(_prepared(adapter, [row], DEFAULT))
        assert_equal(
            prompts.get(row.id), alone.get(row.id), f"row {row.id!r} has another prompt among others than alone"
        )


@check("preparing.long_prompts", needs=NEEDS, cases=_alone)
def long_prompts(adapter: Adapter, rows: list[DataRow]) -> None:
    """A prompt of as many tokens as the limit is kept whole, and one with more is treated as declared.

    Silent because the rows that are lost are not in any curve: a limit on letters drops three in four of them, and prompts
    that are too long, or cut at the wrong end, ask for nothing. Look at what is counted (letters, tokens without the
    template), at `<` for `<=`, at `truncation_side`, and at a filter whose result is not used.
    """
    whole = _ids(_prepared(adapter, rows, DEFAULT))
    lengths = sorted({len(ids) for ids in whole.values()})
    for limit in (*lengths, lengths[-1] - 1):
        options, treatment = PreparationOptions(max_prompt_tokens=limit), adapter.conventions.long_prompt
        too_long = [id for id, ids in whole.items() if len(ids) > limit]
        told = f"with a limit of {limit} tokens, prompts of {[len(ids) for ids in whole.values()]} tokens"
        if treatment == "raise" and too_long:
            data = unless_raised(adapter.prepare, copy.deepcopy(rows), tiny_chat_tokenizer(), options)
            assert_true(data is None, f"{told} are prepared, although one that is too long is declared to be an error")
            continue
        expected = {}
        for id, ids in whole.items():
            if len(ids) <= limit or treatment != "drop":
                expected[id] = ids[:limit] if treatment == "right" else ids[max(0, len(ids) - limit) :]
        got = _ids(_prepared(adapter, rows, options))
        assert_equal(list(got), list(expected), f"{told} are not the ones to keep", quantity="rows")
        assert_equal(got, expected, f"{told} are not cut as declared", quantity="ids")


def _repeated() -> Iterator[Case]:
    first, second, third = ROWS[0], ROWS[1], ROWS[3]
    copies = [replace(first, id="a again"), replace(first, id="a once more")]
    yield Case("2 rows", rows=[first, copies[0]])
    yield Case("apart from each other", rows=[first, second, copies[0], third, copies[1]])
    yield Case("other prompts, equal references", rows=[replace(each, reference="4") for each in ROWS])


@check("preparing.equal_prompts", needs=NEEDS, cases=_repeated)
def equal_prompts(adapter: Adapter, rows: list[DataRow]) -> None:
    """Rows with the same prompt and reference are all kept, or only the first of them, as declared.

    Silent because a dataset that lost rows, or has some many times over, is a dataset too. Look for rows that are collected
    in a dictionary by prompt or by answer, and for a deduplication that is configured and not applied.
    """
    drops = adapter.conventions.equal_prompts == "drop"
    expected: dict[tuple[str, str], list[Hashable]] = {}
    for row in rows:
        same = expected.setdefault((repr(row.messages), row.reference), [])
        same += [] if drops and same else [row.id]
    kept = {id for same in expected.values() for id in same}
    names = _names(_prepared(adapter, rows, DEFAULT).kept)
    told = f"equal rows are declared as {adapter.conventions.equal_prompts!r}, and others are kept"
    assert_equal(names, [row.id for row in rows if row.id in kept], told)


@check("preparing.order_of_the_seed", needs=NEEDS)
def order_of_the_seed(adapter: Adapter) -> None:
    """A seed shuffles the rows, always in the same way, and each seed in a way of its own; 0 is a seed.

    Silent because any order trains: a seed of 0 that counts as none leaves the order of the file, in which like stands
    beside like, and a shuffle by the global generators differs between ranks and after a resume. Look for `if seed:`, and
    for `shuffle` without a generator of its own.
    """
    orders = []
    for seed in (0, 1, 2):
        names = _names(_prepared(adapter, MANY, PreparationOptions(seed=seed)).kept)
        assert_equal(sorted(names), _names(MANY), f"shuffled with the seed {seed}, not every row is there")
        again = _names(_prepared(adapter, MANY, PreparationOptions(seed=seed)).kept)
        assert_equal(again, names, f"shuffled again with the seed {seed}, the rows have another order")
        orders.append(names)
    told = "shuffled with the seeds 0, 1 and 2 and as given, the rows have this many orders"
    assert_equal(len({tuple(names) for names in (*orders, _names(MANY))}), 4, told)


def _divisions() -> Iterator[Case]:
    for told, counts, held_out, seed in (
        ("3 held out", {}, 3, None),
        ("1 held out, shuffled", {}, 1, 0),
        ("2 of one dataset", {"thirds": 2}, 0, None),
        ("2 of one dataset and 5 of another, shuffled", {"thirds": 2, "sums": 5}, 0, 3),
        ("all of both", {"thirds": 4, "sums": 8}, 0, None),
    ):
        yield Case(told, options=PreparationOptions(counts=counts, held_out=held_out, seed=seed))


@check("preparing.parts_of_the_data", needs=NEEDS, cases=_divisions)
def parts_of_the_data(adapter: Adapter, options: PreparationOptions) -> None:
    """The options say how many rows of a dataset are taken and held out; no row is both trained and held out.

    Silent because a mixture with other shares trains another policy without a word, and an evaluation on rows that are
    trained only looks better. Look for shares that are applied twice or after a shuffle of all, for a split that is
    drawn anew by another seed in the evaluation, and for indices of the rows before they were filtered.
    """
    data = _prepared(adapter, MANY, options)
    assert_equal(len(data.held_out), options.held_out, "other than as many rows as told are held out")
    given, got = (Counter(row.dataset for row in rows) for rows in (MANY, [*data.kept, *data.held_out]))
    assert_equal(dict(got), {**given, **options.counts}, "datasets have other numbers of rows than told")
    again = _prepared(adapter, MANY, options)
    told = "with the same options, other rows are held out the second time"
    assert_equal(_names(again.held_out), _names(data.held_out), told)


def _changes(conventions: Conventions) -> Iterator[Case]:
    edited = [replace(row, messages=[{"role": "user", "content": f"{row.id}+2?"}]) for row in MANY]
    answered = [replace(row, reference=f"{row.reference}0") for row in MANY]
    brief, french = (PreparationOptions(system_prompt=system) for system in ("be brief", "answer in French"))
    some, other = PreparationOptions(seed=0), PreparationOptions(seed=1)
    short, held_out = PreparationOptions(max_prompt_tokens=3), PreparationOptions(held_out=2)
    for told, rows, options, later_rows, later in (
        ("rows with other prompts", MANY, DEFAULT, edited, DEFAULT),
        ("rows with other references", MANY, DEFAULT, answered, DEFAULT),
        ("another system prompt", MANY, brief, MANY, french),
        ("no system prompt", MANY, brief, MANY, DEFAULT),
        ("another seed", MANY, some, MANY, other),
        ("another limit", ROWS, DEFAULT, ROWS, short),
        ("another split", MANY, DEFAULT, MANY, held_out),
        ("other counts", MANY, DEFAULT, MANY, PreparationOptions(counts={"thirds": 2})),
    ):
        yield Case(told, rows=rows, options=options, later_rows=later_rows, later=later)
    if conventions.prompt_style == "template":
        template = "{{ messages }}"
        yield Case("another template", rows=MANY, options=DEFAULT, later_rows=MANY, later=DEFAULT, template=template)


def _result(data: PreparedData | None) -> list[list[tuple[Hashable, list[int], str]]]:
    """Return what training and evaluation see of a preparation, nothing where it raised."""

    def seen(row: PreparedRow) -> tuple[Hashable, list[int], str]:
        return row.id, [int(token) for token in row.prompt_ids], row.reference

    return [list(map(seen, part)) for part in (data.kept, data.held_out)] if data else []


@check("preparing.earlier_calls", needs=NEEDS, cases=_changes)
def earlier_calls(
    adapter: Adapter,
    rows: list[DataRow],
    options: PreparationOptions,
    later_rows: list[DataRow],
    later: PreparationOptions,
    template: str = "",
) -> None:
    """Other rows, options or another template give another result, and the same ones the same again.

    Silent because what comes from a cache was right once: the run uses the system prompt, the limit or the template of the
    run before. Look at the key of the cache, in memory and on disk, for what it leaves out: it has to have all inputs, the
    tokenizer's template and the content of the rows among them.
    """
    tokenizer, other = tiny_chat_tokenizer(), tiny_chat_tokenizer()
    other.chat_template = template or other.chat_template
    first = _result(adapter.prepare(copy.deepcopy(rows), tokenizer, options))
    second = _result(unless_raised(adapter.prepare, copy.deepcopy(later_rows), other, later))
    assert_true(second != first, "what was changed since an earlier call does not change the result", quantity="data")
    again = _result(adapter.prepare(copy.deepcopy(rows), tokenizer, options))
    assert_equal(again, first, "after another call the same rows and options give another result")


@check("preparing.inputs_untouched", severity="hardening", needs=NEEDS, cases=_prompts)
def inputs_untouched(adapter: Adapter, rows: list[DataRow], system: str) -> None:
    """Preparing does not modify the rows.

    Silent because the first use is right: a system prompt that is inserted in place is there twice in the next one, and
    messages that are popped are missing in the evaluation. Look for `insert`, `append` and `pop` on a row's own list.
    """
    before = copy.deepcopy(rows)
    adapter.prepare(rows, tiny_chat_tokenizer(), PreparationOptions(system_prompt=system))
    assert_equal(rows, before, "the given rows changed")
