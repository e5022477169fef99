"""The result of a search, as an object and as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlcanary.bisect.plan import Plan
from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.search.verdict import Step
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.git import Commit, Repository

SCHEMA = 2
NEXT_BEST = 3
WORTH_NAMING = 0.005
"""The least probability of a suspect that is named."""


@dataclass(frozen=True)
class Merge:
    """A guilty merge, and a note on the search inside it."""

    commit: Commit
    note: str
    """The reason why the search ended at the merge. Empty if it went on to a commit of the branch."""


@dataclass(frozen=True)
class Report:
    """The result of a search. The JSON result has the same fields."""

    status: str
    """The kind of result.

    One of found, steps (two commits each break a part of the runs), range (several suspects are left), relapse (the
    history breaks more than once), budget (a limit was reached), refused (an end contradicts its name),
    interrupted, aborted (by the outcome table).
    """
    exit_code: int
    message: str
    suspects: tuple[Commit, ...]
    """The suspects, oldest first. Only the culprit if it was found."""
    observations: tuple[Observation, ...]
    """Every run that counts, in the order in which they ended."""
    runs: int
    """The number of runs in this session."""
    reused: int
    """The number of outcomes from a journal or a log."""
    seconds: float
    """The total duration of all known runs."""
    wall_seconds: float
    """The duration of this session from start to end."""
    log: Path | None
    journal: Path
    probability: float = 1.0
    """The probability that one of the suspects is the culprit."""
    posterior: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)
    relapse: tuple[Commit, Commit] | None = None
    steps: tuple[Step, ...] = ()
    merges: tuple[Merge, ...] = ()
    environments_built: int = 0
    commits: Mapping[str, Commit] = field(default_factory=dict)

    @property
    def culprit(self) -> Commit | None:
        return self.suspects[0] if self.status == "found" else None

    def next_best(self) -> list[tuple[Commit, float]]:
        """List the most probable commits besides the suspects."""
        chosen = {commit.sha for commit in self.suspects} if self.culprit else set()
        ranked = sorted(self.posterior.items(), key=lambda item: -item[1])
        others = [(self.commits[sha], share) for sha, share in ranked if sha not in chosen and share >= WORTH_NAMING]
        return others[:NEXT_BEST]


@dataclass(frozen=True)
class Evidence:
    """All runs of one commit."""

    commit: Commit
    observations: tuple[Observation, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        return Counter(observation.outcome for observation in self.observations)


def evidence_by_commit(observations: Sequence[Observation], repository: Repository) -> list[Evidence]:
    """Group the observations by commit, in the order of the history."""
    of: dict[str, list[Observation]] = {}
    for observation in observations:
        of.setdefault(observation.commit, []).append(observation)
    if not of:
        return []
    order = repository.git("rev-list", "--topo-order", *of).split()
    position = {sha: index for index, sha in enumerate(order)}
    commits = sorted(repository.commits("--no-walk=unsorted", *of), key=lambda commit: -position[commit.sha])
    return [Evidence(commit, tuple(of[commit.sha])) for commit in commits]


def result_json(report: Report, plan: Plan, command: Sequence[str]) -> str:
    """Format the result as JSON. `first_bad` is null unless the search ended at a single commit."""
    culprit = report.culprit
    files = [] if culprit is None else file_names(culprit, plan.repository)
    document = {
        "schema": SCHEMA,
        "status": report.status,
        "exit_code": report.exit_code,
        "message": report.message,
        "first_bad": None if culprit is None else asdict(culprit) | {"files": files},
        "probability": report.probability,
        "suspects": [asdict(commit) for commit in report.suspects],
        "next_best": [{"sha": commit.sha, "probability": share} for commit, share in report.next_best()],
        "posterior": {sha: share for sha, share in report.posterior.items() if share > 0},
        "estimates": {name: value if value == value else None for name, value in report.estimates.items()},
        "relapse": None if report.relapse is None else [commit.sha for commit in report.relapse],
        "steps": [asdict(step) for step in report.steps],
        "merges": [{"sha": merge.commit.sha, "note": merge.note} for merge in report.merges],
        "good": asdict(plan.good),
        "bad": asdict(plan.bad),
        "command": list(command),
        "runs": report.runs,
        "reused": report.reused,
        "seconds": round(report.seconds, 3),
        "wall_seconds": report.wall_seconds,
        "environments_built": report.environments_built,
        "observations": [asdict(observation) for observation in report.observations],
        "notices": list(plan.notices),
        "log": None if report.log is None else str(report.log),
        "journal": str(report.journal),
    }
    return json.dumps(document, indent=2) + "\n"


def changed_files(commit: Commit, repository: Repository) -> str:
    return repository.git("show", "--first-parent", "--format=", "--stat=100", commit.sha).rstrip()


def file_names(commit: Commit, repository: Repository) -> list[str]:
    text = repository.git("show", "--first-parent", "--format=", "--name-only", "-z", commit.sha)
    return [name for name in text.split("\0") if name]
