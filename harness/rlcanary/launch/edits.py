"""A sed script for the launched copy of a test script. The checkout stays unchanged."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlcanary.errors import UserError


@dataclass(frozen=True)
class Edits:
    clauses: str
    """The sed script."""
    file: str
    """The file to edit, relative to the snapshot."""
    allow_no_match: bool = False

    def check(self) -> None:
        """Check the syntax of the clauses.

        Raises:
            UserError: `sed` does not understand them.
        """
        self._run(b"")

    def apply(self, root: Path) -> None:
        """Edit the file under `root`.

        Raises:
            NoMatch: A line of the clauses changes nothing, and `allow_no_match` is off.
        """
        path = root / self.file
        before = path.read_bytes()
        after = self._run(before)
        if not self.allow_no_match and (idle := self._idle(before, after)) is not None:
            raise NoMatch(
                f"SED_CLAUSES change nothing in {self.file}: {idle!r} matches no line; fix the clause, or allow it "
                "with --allow-no-match (SED_ALLOW_NO_MATCH=1)"
            )
        path.write_bytes(after)

    def _idle(self, before: bytes, after: bytes) -> str | None:
        """Find a clause that changes nothing, by running the script without each of its lines."""
        if after == before:
            return self.clauses.strip()
        lines = [line for line in self.clauses.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        for index, line in enumerate(lines):
            rest = "\n".join(lines[:index] + lines[index + 1 :])
            finished = _sed(rest, before)
            if finished.returncode == 0 and finished.stdout == after:
                return line.strip()
        return None

    def _run(self, text: bytes) -> bytes:
        finished = _sed(self.clauses, text)
        if finished.returncode:
            said = finished.stderr.decode(errors="replace").strip()
            raise UserError(f"SED_CLAUSES is not a valid sed script: {said}")
        return finished.stdout


class NoMatch(UserError):
    """A clause matches no line, so the edited script would not be the intended one."""


def _sed(clauses: str, text: bytes) -> subprocess.CompletedProcess[bytes]:
    # `--sandbox` refuses sed commands that write files or run programs.
    return subprocess.run(["sed", "--sandbox", "-e", clauses], input=text, capture_output=True, check=False)
