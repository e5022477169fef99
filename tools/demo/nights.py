"""Runs a command on many commits, several at a time, each in a linked worktree."""

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stage import Stage, failure

AT_ONCE = 2
# The history cannot order runs that start in the same second.
SECONDS_BETWEEN_STARTS = 2


def run_on_commits(stage: Stage, runs: Sequence[tuple[str, Sequence[str]]], on_finished: Callable[[], None]) -> None:
    """Runs each command on its commit, started in the given order.

    Args:
        stage: The repository, and the folder for worktrees and logs.
        runs: Pairs of a commit's full hash and a command.
        on_finished: Called after each run.

    Raises:
        PlayError: A run ended with another exit code than 0. The others are ended.
    """
    free = [stage.home / f"worktree-{number}" for number in range(AT_ONCE)]
    for worktree in free:
        stage.git("worktree", "add", "--quiet", "--detach", str(worktree))
    waiting = list(runs)
    running: dict[Path, Run] = {}
    last_start = -math.inf
    try:
        while waiting or running:
            if waiting and free and time.monotonic() - last_start > SECONDS_BETWEEN_STARTS:
                (commit, command), worktree = waiting.pop(0), free.pop()
                stage.git("-C", str(worktree), "checkout", "--quiet", "--detach", commit)
                running[worktree] = Run(stage, command, worktree, stage.home / f"{commit[:10]}.log")
                last_start = time.monotonic()
            for worktree, run in list(running.items()):
                if run.process.poll() is not None:
                    del running[worktree]
                    run.require_success()
                    free.append(worktree)
                    on_finished()
            time.sleep(0.05)
    finally:
        for run in running.values():
            run.process.terminate()
            run.process.wait()


class Run:
    """A running command whose output goes to a log."""

    def __init__(self, stage: Stage, command: Sequence[str], worktree: Path, log: Path) -> None:
        self.command = command
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=worktree,
                env=stage.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def require_success(self) -> None:
        if self.process.returncode:
            raise failure(self.command, self.process.returncode, self.log.read_text())
