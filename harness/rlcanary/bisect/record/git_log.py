"""Read and write logs in the format of `git bisect log`, and read journals of searches."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcanary.bisect.record.journal import Header, Observation, Record
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.git import Repository

OURS = "# rlcanary "
TERMS = {Outcome.GOOD: "good", Outcome.BAD: "bad", Outcome.UNTESTABLE: "skip"}
QUIET = ("reset", "log", "visualize", "view", "terms", "next")


@dataclass(frozen=True)
class Mark:
    """One line of a log."""

    commit: str
    outcome: Outcome
    value: float | None = None
    """The metric's value."""


@dataclass
class BisectLog:
    """The contents of a log, with every commit as its SHA."""

    good: str | None = None
    bad: str | None = None
    marks: list[Mark] = field(default_factory=list)
    """The marks in log order.

    Every line of an rlcanary log is a run. In other logs the last line about a commit counts.
    """
    root: str | None = None
    """The root commit of the repository. Only rlcanary's own logs record it."""
    damage: list[str] = field(default_factory=list)
    """A sentence for each unusable line of a journal."""


def format_log(header: Header, observations: Iterable[Observation], repository: Repository) -> str:
    """Format a log: git's lines, which may be edited by hand, and a JSON comment with the facts of each run."""

    def comment(term: str, sha: str) -> str:
        return f"# {term}: [{sha}] {repository.commit(sha).subject}"

    lines = [
        OURS + json.dumps(asdict(header)),
        comment("bad", header.bad),
        comment("good", header.good),
        f"git bisect start --first-parent '{header.bad}' '{header.good}'",
    ]
    # For git the last bad commit counts: later commits go first, those inside merges last. rlcanary ignores the order.
    newest_first = repository.commits("--first-parent", f"{header.good}..{header.bad}")
    place = {commit.sha: place for place, commit in enumerate(newest_first)}
    for observation in sorted(observations, key=lambda run: place.get(run.commit, len(place))):
        lines.append(OURS + json.dumps(asdict(observation)))
        if (term := TERMS.get(observation.outcome)) is not None:
            lines += [comment(term, observation.commit), f"git bisect {term} {observation.commit}"]
    return "\n".join(lines) + "\n"


def read_log(path: Path, repository: Repository) -> BisectLog:
    """Read a log of git or rlcanary, or an rlcanary journal.

    A log of git holds the names that were typed (`git bisect start HEAD v1`), and SHAs in its comments. The SHAs count,
    because a name may have moved since. GOOD and BAD of a log that rlcanary did not write are trusted.

    Raises:
        UserError: A line is no bisect command, or names a commit that is not in this repository.
    """
    path = path / "journal.jsonl" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read the log {path}: {error.strerror}") from None
    log = (
        _from_journal(path) if text.startswith(('{"event": ', '{"journal": ')) else _from_lines(text, path, repository)
    )
    if log.root is not None and repository.find(log.root) is None:
        raise UserError(f"{path} belongs to another repository: its first commit {log.root[:10]} is not in this one")
    if log.root is None:
        log.marks = list({mark.commit: mark for mark in log.marks}.values())
    return log


def _from_journal(path: Path) -> BisectLog:
    record = Record(path)
    header = record.header
    if header is None:
        raise UserError(f"{path} is a journal without its header, or of another version of rlcanary")
    marks = [Mark(o.commit, o.outcome, o.value) for o in record.observations()]
    return BisectLog(header.good, header.bad, marks, header.root, record.damage)


def _from_lines(text: str, path: Path, repository: Repository) -> BisectLog:
    log = BisectLog()
    words = {
        "good": Outcome.GOOD,
        "old": Outcome.GOOD,
        "bad": Outcome.BAD,
        "new": Outcome.BAD,
        "skip": Outcome.UNTESTABLE,
    }
    noted: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        if line.startswith(OURS):
            facts = _facts(line, where)
            log.root = log.root or facts.get("root")
            if facts.get("outcome") == Outcome.MEASURED:
                if not {"commit", "value"} <= facts.keys():
                    raise UserError(
                        f"{where}: a measured outcome has a `commit` and a `value`: edit or delete the line"
                    )
                _mark(log, Outcome.MEASURED, _commits(facts["commit"], repository, where)[0], facts["value"])
            continue
        if line.startswith("#"):
            if (note := _note(line)) is not None:
                noted.append(note)
            continue
        try:
            parts = shlex.split(line)
        except ValueError:
            parts = [line]
        if not parts:
            continue
        if parts[:2] != ["git", "bisect"] or len(parts) < 3:
            raise UserError(f"{where}: {line.strip()!r} is not a `git bisect` command: edit or delete the line")
        action, arguments = parts[2], parts[3:]
        if action == "start":
            _start(log, arguments, noted, words, repository, where)
        elif action in words:
            outcome = words[action]
            for ref in arguments:
                for sha in _commits(ref, repository, where):
                    _mark(log, outcome, sha)
        elif action not in QUIET:
            raise UserError(f"{where}: `git bisect {action}` is not supported: edit or delete the line")
        noted.clear()
    return log


def _mark(log: BisectLog, outcome: Outcome, sha: str, value: float | None = None) -> None:
    log.marks.append(Mark(sha, outcome, value))
    if outcome is Outcome.GOOD:
        log.good = log.good or sha
    elif outcome is Outcome.BAD:
        log.bad = log.bad or sha


def _start(
    log: BisectLog,
    arguments: list[str],
    noted: list[tuple[str, str]],
    words: dict[str, Outcome],
    repository: Repository,
    where: str,
) -> None:
    refs: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            break
        name, _, value = argument.partition("=")
        if name in ("--term-good", "--term-old"):
            words[value or next(remaining, "")] = Outcome.GOOD
        elif name in ("--term-bad", "--term-new"):
            words[value or next(remaining, "")] = Outcome.BAD
        elif not argument.startswith("-"):
            refs.append(argument)
    shas = [sha for _, sha in noted] if len(noted) == len(refs) else refs
    ends = [commit for ref in shas for commit in _commits(ref, repository, where)]
    outcomes = [Outcome.BAD] + [Outcome.GOOD] * len(ends)
    for outcome, sha in zip(outcomes, ends, strict=False):
        if log.root is None:
            _mark(log, outcome, sha)
        elif outcome is Outcome.BAD:
            log.bad = sha  # In rlcanary's logs tested ends have their own lines.
        else:
            log.good = sha


def _note(line: str) -> tuple[str, str] | None:
    """Parse the term and SHA of git's comment `# bad: [SHA] subject`."""
    term, colon, rest = line[1:].partition(":")
    sha = rest.strip().removeprefix("[").split("]")[0]
    return (term.strip(), sha) if colon and rest.strip().startswith("[") and "first" not in term else None


def _facts(line: str, where: str) -> dict[str, Any]:
    """Parse the JSON of a comment that rlcanary wrote."""
    try:
        facts = json.loads(line.removeprefix(OURS))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{where}: damaged JSON: delete the line")
    return facts


def _commits(ref: str, repository: Repository, where: str) -> list[str]:
    """Resolve one commit, or a range `A..B`, which `git bisect skip` allows."""
    if ".." in ref and all(repository.find(end) for end in ref.split("..", 1) if end):
        return repository.git("rev-list", ref).split()
    sha = None if ref.startswith("-") else repository.find(ref)
    if sha is None:
        raise UserError(
            f"{where}: {ref} is not a commit in this repository: is the log from another one, or is a `git fetch` needed?"
        )
    return [sha]
