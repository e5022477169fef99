"""Real git repositories to bisect, and the commands that do it."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from waiting import HANG_S

DRIVER = Path(__file__).parents[3] / "tools" / "bisect-run.sh"
BUG = "sh", "-c", "test $(cat value) -lt 63"


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=repository, check=True, capture_output=True, text=True, timeout=HANG_S
    ).stdout.strip()


def make_history(
    folder: Path, n: int, files_at: Callable[[int], Mapping[str, str]], executable: Sequence[str] = ()
) -> Path:
    """A repository with commits tagged c1 to cN, the i-th holding exactly the files of files_at(i)."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    stream = []
    for i in range(1, n + 1):
        message = f"change {i} [wip]"
        stream.append(
            f"commit refs/heads/main\ncommitter N <n@example.org> {1_700_000_000 + i} +0000\n"
            f"data {len(message)}\n{message}\ndeleteall\n"
        )
        for path, text in files_at(i).items():
            mode = "100755" if path in executable else "100644"
            stream.append(f"M {mode} inline {path}\ndata {len(text.encode())}\n{text}\n")
        stream.append(f"reset refs/tags/c{i}\nfrom refs/heads/main\n")
    subprocess.run(
        ["git", "fast-import", "--quiet"], cwd=folder, input="".join(stream), text=True, check=True, timeout=HANG_S
    )
    git(folder, "reset", "--hard", "--quiet", "main")
    return folder


def numbered(i: int) -> dict[str, str]:
    return {"value": f"{i}\n", "sub dir/kept": "x\n"}


def bisect(directory: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlcanary", "bisect", *arguments],
        cwd=directory,
        env=os.environ | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def found(process: subprocess.CompletedProcess[str]) -> str:
    """The subject of the commit that a search named."""
    assert process.returncode == 0, process.stderr
    assert "is the first bad commit" in process.stdout
    return process.stdout.split("Subject: ")[1].splitlines()[0]


def refusal(process: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused start ends with."""
    assert process.returncode == 2, process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    last = process.stderr.splitlines()[-1]
    assert last.startswith("rlcanary: ")
    return last


def contents(repository: Path) -> dict[str, str]:
    """Every file of the checkout and of its git directory, except what a bisect saves."""
    kept = {}
    for path in sorted(repository.rglob("*")):
        relative = path.relative_to(repository)
        if path.is_file() and relative.parts[:2] != (".git", "rlcanary") and relative.parts[0] != "bisect-logs":
            kept[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return kept


def log_of(repository: Path) -> Path:
    return max((repository / "bisect-logs").glob("*.log"))


def counting(counter: Path, test: str) -> tuple[str, ...]:
    """A command that notes each run in the file `counter`, with the value of the commit."""
    return "sh", "-c", f"cat value >> '{counter}'; {test}"


@contextlib.contextmanager
def started_search(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A search under way, in a session of its own so that signals to its group do not reach the tests."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcanary", "bisect", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGHUP)] and None,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def values(counter: Path) -> list[int]:
    return [int(line) for line in counter.read_text().split()] if counter.exists() else []
