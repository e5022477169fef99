"""The failures that a team knows of: a plain file that keeps their CI green, and turns it red when it goes stale.

One check a line, its id and the reason behind a #:

    advantage.constant_reward_is_zero  # float32 rounding, 6e-4 at most; see issue 12
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlcanary.checks.registry import Result, all_checks
from rlcanary.errors import UserError


def read_expected(path: Path) -> dict[str, str]:
    """The expected failures of a file: check id -> reason.

    Raises:
        UserError: the file cannot be read, a line has no reason, or a check is unknown or named twice.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"cannot read the expected failures in {path}: {error.strerror}") from error
    known = {check.id for check in all_checks()}
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        check_id, _, reason = (part.strip() for part in line.partition("#"))
        if not check_id:
            continue
        where = f"{path}, line {number}"
        if check_id not in known:
            raise UserError(f"{where}: there is no check {check_id!r}")
        if not reason:
            raise UserError(f"{where}: say behind a # why {check_id} is expected to fail")
        if check_id in expected:
            raise UserError(f"{where}: {check_id} stands there twice")
        expected[check_id] = reason
    return expected


@dataclass(frozen=True)
class Comparison:
    """Results held against the expected failures.

    Attributes:
        unexpected: failed or raised without being expected.
        known: failed as expected.
        stale: expected to fail, but passed or did not run.
    """

    unexpected: list[Result]
    known: list[Result]
    stale: list[Result]

    @property
    def is_red(self) -> bool:
        return bool(self.unexpected or self.stale)


def compare(results: Iterable[Result], expected: dict[str, str]) -> Comparison:
    """Sort results into what is new, known and stale."""
    results = list(results)
    failed = [result for result in results if result.status in ("fail", "error")]
    return Comparison(
        unexpected=[result for result in failed if result.id not in expected],
        known=[result for result in failed if result.id in expected],
        stale=[result for result in results if result.id in expected and result not in failed],
    )
