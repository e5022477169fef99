"""Recover killed runs: turn their journals into results files, and set unreadable ones aside."""

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rlcanary.recording.assembly import JOURNAL_KIND, JOURNAL_VERSION, assemble, problem_of
from rlcanary.recording.results_file import (
    CONTROLLER,
    JOURNALS,
    RUN_ID_VARIABLE,
    history_folder,
    results_text,
)
from rlcanary.system.files import temporary_pattern, write_whole
from rlcanary.system.journal import Record, UnreadableJournal, read_journal, try_lock

SET_ASIDE = "unreadable"


class RunFolder(NamedTuple):
    """The journals of a run. `damage` has a line per unreadable part, `torn` one per half-written line."""

    records: list[Record]
    damage: list[str]
    torn: list[str]


class Recovery(NamedTuple):
    files: list[Path]
    problems: list[str]


def read_run_folder(folder: Path, without: str | None = None) -> RunFolder:
    """Reads the journals of a run, first the controller's, last that of the last test; the one named `without` is left out.

    A test whose worker crashed may have run again in another one, whose attempt counts.

    Raises:
        OSError: if one cannot be read.
    """
    found = RunFolder([], [], [])
    paths = [path for path in folder.glob("*.jsonl") if path.stem != without]
    for path in sorted(paths, key=lambda path: (path.stem != CONTROLLER, path.lstat().st_mtime_ns, path.name)):
        if not path.is_file():
            found.damage.append(f"{path} is not a file")
            continue
        try:
            records, damage = read_journal(path, JOURNAL_KIND, JOURNAL_VERSION, problem_of)
        except UnreadableJournal as error:
            found.damage.append(str(error))
            continue
        found.records.extend(records)
        for line in damage:
            (found.torn if line.unfinished else found.damage).append(str(line))
    return found


def recover_killed_runs(history: Path) -> Recovery:
    """Writes the results file of every run whose processes are gone but whose journals are still here.

    The caller holds the folder's lock.
    """
    recovery = Recovery([], [])
    for folder in sorted(path for path in (history / JOURNALS).iterdir() if path.is_dir()):
        if folder.name in (SET_ASIDE, os.environ.get(RUN_ID_VARIABLE)):
            continue
        try:
            if not _is_alive(folder):
                _recover(folder, history, recovery)
        except OSError as error:
            recovery.problems.append(f"an earlier run cannot be completed ({error}); its journals stay in {folder}")
    return recovery


def _recover(folder: Path, history: Path, recovery: Recovery) -> None:
    records, damage, torn = read_run_folder(folder)
    recovery.problems.extend(torn)
    header = next((record for record in records if record["record"] == "run"), None)
    path = history / f"{folder.name}.json"
    # The run may have been killed after its file was written whole and before its journals were removed.
    if header is not None and not path.exists():
        try:
            text = results_text(assemble(header, records, exit_status=None, coverage=None))
        except (ValueError, RecursionError) as error:  # numbers beyond all floats, values that are nested too deep
            damage.append(f"{folder} cannot be written as JSON: {error}")
        else:
            write_whole(path, text)
            recovery.files.append(path)
    elif header is None and records:
        damage.append(f"{folder} has no header that can be read")
    recovery.problems.extend(damage)
    if damage:
        recovery.problems.append(f"the journals with this damage were set aside: {set_aside(folder)}")
    else:
        shutil.rmtree(folder)


def set_aside(folder: Path) -> Path:
    """Moves a run's folder out of the way of later runs; returns the new place."""
    aside = folder.parent / SET_ASIDE
    aside.mkdir(exist_ok=True)
    place = aside / folder.name
    if place.exists():
        place = aside / f"{folder.name}-{os.urandom(4).hex()}"
    return folder.rename(place)


def remove_unfinished_files(results_file: Path) -> None:
    """Removes the unfinished files of runs killed in the middle of a write.

    The caller holds the folder's lock, under which all writing happens.
    """
    for path in results_file.parent.glob(temporary_pattern(results_file.name)):
        path.unlink()
    for path in history_folder(results_file).glob(temporary_pattern("*")):
        path.unlink()


def _is_alive(folder: Path) -> bool:
    with ExitStack() as opened:
        for path in filter(Path.is_file, folder.glob("*.jsonl")):
            stream = opened.enter_context(path.open("r+b"))
            try:
                try_lock(stream.fileno(), path)
            except BlockingIOError:
                return True
            fcntl.lockf(stream, fcntl.LOCK_UN)
    return False
