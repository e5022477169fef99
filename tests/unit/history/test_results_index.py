"""The index of a results folder always says what the files say, whatever happens to either."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

from rlcanary.errors import UserError
from rlcanary.history.history import History, load_history
from rlcanary.history.index import INDEX_NAME, LOCK_NAME, number_or_glimpse

KEY = "test_policy::test_generation"
Load = Callable[[Path], History]


def write_run(folder: Path, index: int, **metrics: Any) -> Path:
    document = {
        "exit_status": 0,
        "git_commit": f"{index:040x}",
        "start_time_utc": f"2025-03-01T{index // 3600:02d}:{index // 60 % 60:02d}:{index % 60:02d}+00:00",
        "metrics": {KEY: metrics or {"loss": index / 8}},
        "schema": 1,
        "run_id": f"run{index}",
        "tests": {"tests/test_policy.py::test_generation": {"key": KEY}},
    }
    path = folder / f"run{index}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(12):
        write_run(tmp_path, index)
    return tmp_path


def values(history: History, metric: str = "loss") -> list[float | None]:
    return history.series(f"{KEY}.{metric}").values


@pytest.fixture
def load() -> Iterator[Load]:
    """load_history, whose histories are closed before the next one and at the end."""
    with ExitStack() as stack:

        def load(folder: Path) -> History:
            stack.close()
            return stack.enter_context(load_history(folder))

        yield load


def files_read(folder: Path) -> list[str]:
    """The files that bringing the index up to date reads."""
    read: list[str] = []

    def watch(names: list[str]) -> Iterable[str]:
        read.extend(names)
        return names

    with load_history(folder, watch):
        return read


def test_runs_are_in_the_order_of_their_times(folder: Path, load: Load) -> None:
    assert values(load(folder)) == [index / 8 for index in range(12)]
    assert load(folder).series(f"{KEY}.loss").nodeids == {"tests/test_policy.py::test_generation": 12}


def test_file_is_read_once(folder: Path) -> None:
    assert len(files_read(folder)) == 12
    assert files_read(folder) == []
    write_run(folder, 12)
    assert files_read(folder) == ["run12.json"]


def test_change_of_one_digit_is_seen(folder: Path, load: Load) -> None:
    load(folder)
    path = folder / "run3.json"
    size = path.stat().st_size
    path.write_text(path.read_text().replace("0.375", "0.876"))
    assert path.stat().st_size == size
    assert values(load(folder))[3] == 0.876


def test_file_that_replaces_another_with_its_time_and_size_is_seen(folder: Path, load: Load) -> None:
    load(folder)
    old = folder / "run3.json"
    status = old.stat()
    new = folder / "new"
    new.write_text(old.read_text().replace("0.375", "0.675"))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(old)
    assert values(load(folder))[3] == 0.675


def test_removed_run_and_its_metrics_are_gone(folder: Path, load: Load) -> None:
    path = write_run(folder, 12, rare=1.0)
    assert (KEY, "rare") in load(folder).metrics()
    path.unlink()
    history = load(folder)
    assert list(history.metrics()) == [(KEY, "loss")]
    assert len(history.runs) == 12


def test_bad_files_are_named_every_time_and_cost_nothing_else(folder: Path, load: Load) -> None:
    whole = (folder / "run0.json").read_text()
    bad = {
        "empty.json": "",
        "truncated.json": whole[:70],
        "list.json": "[1]",
        "package.json": '{"name": "x", "version": "1"}',
        "types.json": whole.replace('"exit_status": 0', '"exit_status": "0"'),
    }
    for name, text in bad.items():
        (folder / name).write_text(text)
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "folder.json").mkdir()
    (folder / "nowhere.json").symlink_to("missing")
    for _ in range(2):
        history = load(folder)
        assert values(history) == [index / 8 for index in range(12)]
        named = sorted(Path(problem.partition(": ")[0]).name for problem in history.problems)
        assert named == sorted([*bad, "binary.json", "folder.json", "nowhere.json"])


def test_copy_of_a_run_counts_once(folder: Path, load: Load) -> None:
    (folder / "run3 (copy).json").write_text((folder / "run3.json").read_text())
    history = load(folder)
    assert len(history.runs) == 12
    assert history.problems == [f"{folder}/run3.json: holds the same run as run3 (copy).json; counted once"]


def test_text_that_no_database_takes_is_kept_readable(folder: Path, load: Load) -> None:
    write_run(folder, 12, **{"half \ud83d": 1.0, "text": "half \ud83d"})
    history = load(folder)
    assert values(history, "half \\ud83d") == [1.0]
    with pytest.raises(UserError, match=r"is not a number"):
        history.series(f"{KEY}.text")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (1, (1.0, None)),
        (True, (1.0, None)),
        (float("nan"), (None, None)),
        (float("-inf"), (None, None)),
        (10**400, (None, None)),
        (None, (None, None)),
        ("x", (None, "'x'")),
        ([10] * 99, (None, "[10, 10, 10, 10, 10, 10, 10, 10, 10, ...")),
    ],
)
def test_only_finite_numbers_have_a_value(value: Any, stored: tuple[float | None, str | None]) -> None:
    assert number_or_glimpse(value) == stored


@pytest.mark.parametrize("damage", ["garbage", "truncated", "zeroed page", "other version"])
def test_broken_index_is_built_anew(folder: Path, damage: str, load: Load) -> None:
    load(folder)
    index = folder / INDEX_NAME
    content = bytearray(index.read_bytes())
    match damage:
        case "garbage":
            index.write_bytes(b"no database" * 1000)
        case "truncated":
            index.write_bytes(content[: len(content) // 2])
        case "zeroed page":
            content[4096:8192] = bytes(4096)
            index.write_bytes(content)
        case "other version":
            content[60:64] = (99).to_bytes(4, "big")
            index.write_bytes(content)
    for _ in range(2):
        history = load(folder)
        assert values(history) == [index / 8 for index in range(12)]
        assert history.problems == []
    assert files_read(folder) == []


def test_index_that_turns_out_damaged_in_the_middle_says_so(folder: Path, load: Load) -> None:
    for index in range(12, 200):
        write_run(folder, index, **{f"metric_{i}": float(i) for i in range(40)})
    history = load(folder)
    pages = (folder / INDEX_NAME).read_bytes()
    for number in range(1, len(pages) // 4096):
        load(folder)
        (folder / INDEX_NAME).write_bytes(pages[: 4096 * number] + b"\xff" * 4096 + pages[4096 * (number + 1) :])
        try:
            history = load(folder)
            assert len(values(history, "metric_7")) == 188
        except UserError as error:
            assert "is damaged" in str(error)  # noqa: PT017 - the other outcome is as good
            (folder / INDEX_NAME).unlink()
        assert len(values(load(folder), "metric_7")) == 188


@pytest.mark.parametrize("blocked", [INDEX_NAME, LOCK_NAME])
def test_folder_that_takes_no_index_is_read_all_the_same(folder: Path, blocked: str, load: Load) -> None:
    (folder / blocked).mkdir()
    history = load(folder)
    assert values(history) == [index / 8 for index in range(12)]
    (problem,) = history.problems
    assert f"the index of {folder} cannot be kept there" in problem


def test_folder_without_a_run_gets_no_index(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(UserError, match=r"no results .*package\.json"):
        load_history(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"]


READER = """
import sys, pathlib
from rlcanary.history.history import load_history
history = load_history(pathlib.Path(sys.argv[1]))
assert not history.problems, history.problems
print(len(history.runs), sum(history.series(sys.argv[2]).values))
"""


def start_reader(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, str(folder), f"{KEY}.loss"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_find_it_stale_together_all_answer_right(folder: Path) -> None:
    for index in range(12, 400):
        write_run(folder, index)
    for _ in range(2):
        readers = [start_reader(folder) for _ in range(4)]
        for reader in readers:
            answer, problem = reader.communicate(timeout=HANG_S)
            assert (answer.split(), problem) == (["400", str(sum(range(400)) / 8)], "")
        (folder / INDEX_NAME).write_bytes(b"broken" * 5000)


def test_process_killed_while_it_updates_leaves_a_whole_index(folder: Path, load: Load) -> None:
    dice = random.Random(0)
    for round_number in range(6):
        for index in range(12 + 100 * round_number, 112 + 100 * round_number):
            write_run(folder, index)
        reader = start_reader(folder)
        time.sleep(dice.uniform(0.05, 0.25))
        os.kill(reader.pid, signal.SIGKILL)
        reader.communicate()
    history = load(folder)
    assert values(history) == [index / 8 for index in range(612)]
    assert history.problems == []
