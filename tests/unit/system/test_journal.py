"""Append-only journals: what `append` returned from is read back, and what is damaged is named."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlcanary.system.journal import Journal, UnreadableJournal, read_journal

HEADER = '{"journal": "test", "version": 1}'


def open_journal(path: Path, **options: Any) -> Journal:
    return Journal(path, "test", 1, **options)


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in read_journal(path, "test", 1).records]


@contextmanager
def disk_with(path: Path, more_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond the size of this one and so many bytes: a write is cut short there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_records_come_back_as_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    written = [{"n": 1, "text": "µ\n\u2028\ud800"}, {"n": [1.5, None]}]
    journal.append(written[0])
    journal.append(written[1], sync=True)
    assert read_journal(tmp_path / "j", "test", 1) == (written, [])
    assert (tmp_path / "j").read_text().splitlines()[0] == HEADER


@pytest.mark.parametrize("room", [0, 1, 5, 8, 9])
def test_half_line_of_a_full_disk_costs_no_other_record_and_is_named(tmp_path: Path, room: int) -> None:
    path = tmp_path / "j"
    journal = open_journal(path)
    journal.append({"n": 1})
    with disk_with(path, room), pytest.raises(OSError, match=r"File too large"):
        journal.append({"n": 22})
    journal.append({"n": 3})
    assert numbers(path) == [1, 3]
    damage = read_journal(path, "test", 1).damage
    assert [(str(d.path), d.line) for d in damage] == ([(str(path), 3)] if room else [])


def test_half_line_is_closed_by_a_forked_child_and_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = open_journal(path)
    with disk_with(path, 3), pytest.raises(OSError, match="File too large"):
        journal.append({"n": 1})
    child = os.fork()
    if not child:
        journal.append({"n": 2})
        os._exit(0)
    os.waitpid(child, 0)
    assert numbers(path) == [2]
    with disk_with(path, 3), pytest.raises(OSError, match="File too large"):
        journal.append({"n": 3})
    journal.close()
    journal = open_journal(path)
    journal.append({"n": 4})
    assert numbers(path) == [2, 4]
    assert [damage.line for damage in read_journal(path, "test", 1).damage] == [2, 4]


def test_disk_that_is_full_at_the_start_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.touch()
    with disk_with(path, 3), pytest.raises(OSError, match="File too large"):
        open_journal(path)
    assert not path.exists()


def test_header_torn_by_a_crash_is_an_empty_journal_and_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(HEADER[:9])
    assert read_journal(path, "test", 1) == ([], [])
    open_journal(path).append({"n": 1})
    assert numbers(path) == [1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}\n", "not a journal of test"),
        ("[1]\n", "not a journal of test"),
        ("\x00\x00\n", "not a journal of test"),
        ("notes", "not a journal of test"),
        ("[" * 100_000 + "\n", "not a journal of test"),
        ('{"journal": "other", "version": 1}\n', "not a journal of test"),
        ('{"journal": "test", "version": 2}\n', "version 2 .* reads version 1"),
        ('{"journal": "test"}\n', "version None"),
    ],
)
def test_journal_of_another_kind_or_version_is_refused_by_name_and_left_alone(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(UnreadableJournal, match=rf"j: {why}"):
        read_journal(path, "test", 1)
    with pytest.raises(UnreadableJournal, match=rf"j: {why}"):
        open_journal(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"1", b"null", b"\xff{}", b"\x00" * 20, b'{"n": NaN}', b'{"n": ' + b"9" * 5001 + b"}"),
        *(b"[" * 100_000, b'{"n": 0} (torn)', b'{"n": 0}{"n": 0}'),
    ],
)
def test_damaged_line_is_named_and_the_lines_around_it_are_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(HEADER.encode() + b'\n{"n": 1}\n' + line + b'\n{"n": 2}\n')
    assert numbers(path) == [1, 2]
    (damage,) = read_journal(path, "test", 1).damage
    assert (damage.line, damage.unfinished) == (3, line.endswith(b"(torn)"))
    assert str(damage).startswith(f"{path} line 3 is damaged (")


def test_line_without_its_end_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(f'{HEADER}\n{{"n": 1}}\n{{"n": 2}}')
    assert numbers(path) == [1]
    (damage,) = read_journal(path, "test", 1).damage
    assert (damage.line, damage.unfinished) == (3, True)


def test_record_without_a_json_form_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    for value, error in ((float("nan"), ValueError), (object(), TypeError)):
        with pytest.raises(error):
            journal.append({"n": value})
    assert read_journal(tmp_path / "j", "test", 1) == ([], [])


def test_descriptor_that_code_under_test_closed_is_opened_again_and_no_other_file_is_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    journal.append({"n": 1})
    os.close(journal._descriptor)
    journal.append({"n": 2})
    taken = journal._descriptor
    os.close(taken)
    with (tmp_path / "theirs").open("w+b") as theirs:
        assert theirs.fileno() == taken
        journal.append({"n": 3})
        os.close(journal._descriptor)
        os.dup2(theirs.fileno(), journal._descriptor)
        theirs_too = journal._descriptor
        journal.close()
        assert os.fstat(theirs_too).st_size == 0
        os.close(theirs_too)
    assert numbers(tmp_path / "j") == [1, 2, 3]


def test_deleted_journal_and_closed_journal_are_errors(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    (tmp_path / "j").unlink()
    with pytest.raises(FileNotFoundError, match="deleted while it was open"):
        journal.append({"n": 1})
    journal.close()
    with pytest.raises(ValueError, match="is closed"):
        journal.append({"n": 1})


def test_threads_and_a_signal_handler_share_a_journal(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    previous = signal.signal(signal.SIGUSR1, lambda *_: journal.append({"n": -1}))
    try:
        threads = [
            threading.Thread(target=lambda: [journal.append({"n": i, "text": "x" * 5000}) for i in range(50)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for i in range(50):
            os.kill(os.getpid(), signal.SIGUSR1)
            journal.append({"n": i})
        for thread in threads:
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert read_journal(tmp_path / "j", "test", 1).damage == []
    assert sorted(n for n in numbers(tmp_path / "j") if n >= 0) == sorted(list(range(50)) * 9)


WRITER = """
import fcntl, os, sys
from pathlib import Path
from rlcanary.system.journal import Journal
journal = Journal(Path(sys.argv[1]), "test", 1, locking=getattr(fcntl, sys.argv[2]))
for n in range(100):
    journal.append({"n": n})
if os.fork() == 0:
    sys.stdin.read()  # a daemon that lives until the test ends it
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("locking", "survives"), [("lockf", False), ("flock", True)])
def test_killed_writer_loses_nothing_and_its_lock_ends_as_promised(
    tmp_path: Path, locking: str, survives: bool
) -> None:
    path = tmp_path / "j"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), locking], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdin is not None
    lock = getattr(fcntl, locking)
    try:
        assert writer.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match="locked by another process"):
            open_journal(path, locking=lock)
        writer.kill()
        writer.wait()
        if survives:
            with pytest.raises(BlockingIOError):
                open_journal(path, locking=lock)
        else:
            open_journal(path, locking=lock).close()
    finally:
        writer.kill()
        writer.stdin.close()  # ends the daemon
        writer.stdout.read()
        writer.stdout.close()
        writer.wait()
    assert numbers(path) == list(range(100))
    with pytest.raises(FileExistsError):
        open_journal(path, new=True)


def test_every_line_is_json(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j")
    journal.append_line('{"n": 1}')
    assert [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()] == [json.loads(HEADER), {"n": 1}]
