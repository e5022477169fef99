"""Simulated searches for the culprit among commits on which a command fails or passes by chance."""

import heapq
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.likelihood import Likelihood
from rlcanary.bisect.search.metric_noise import Levels
from rlcanary.bisect.search.pass_fail_noise import History, PassFail
from rlcanary.jobs.outcomes import Outcome

try:
    from git_bayesect import Bisector
except ImportError:
    Bisector = None

COMMITS = 1024
METRIC_COMMITS = 256
DEPENDENCIES = np.fromstring(
    "6 14 11 4 6 4 4 8 4 2 1 6 8 10 1 14 1 12 3 1 13 7 3 4 14 33 5 1 18 6 4 8 4 2 7 5 2 6 9 9 1 9 1 7 3 9 7 11 3 2 "
    "6 1 2 8 3 1 2 6 2 37 1 12 1 6 3 2 1 8 15 15 18 11 1 1 3 5 4 4 1 2 5 4 4 12 3 1 5 5 7 7 7 1 9 3 13 1 20 2 9 1 "
    "11 5 2 3 5 3 15 1 16 6 1 19 2 12 14 22 1 2 40 8 5 54 1 1 1 2 12 2 1 1 4 2 8 12 2 13 4 6 8 6 8 18 6 16 9",
    sep=" ",
    dtype=int,
)
"""For how many commits in a row the dependencies stay the same: lock file, pyproject.toml and submodules of the last 1,024
first-parent commits of NeMo-RL 7ea279abf, oldest first. No state comes back."""
PAST_GOOD, PAST_BAD = 20, 5
"""Past results that a tracker knows, where it takes part: of commits before the culprit, and of BAD."""
MOST_RUNS = 2000


@dataclass(frozen=True)
class Trial:
    right: bool
    runs: int
    """Without those on the ends."""
    ends: int = 0
    """Runs of GOOD and BAD."""
    time: float = 0
    """That it took, where a run takes 1 in the mean."""
    builds: int = 0


class Command:
    """A command with noise on a line of commits, one of which broke it. Commit -1 is GOOD."""

    def __init__(self, seed: int, commits: int) -> None:
        self.random = np.random.default_rng(seed)
        self.commits = commits
        self.culprit = int(self.random.integers(commits))

    def fails(self, index: int, false_fail: float, false_pass: float) -> bool:
        return bool(self.random.random() < (1 - false_pass if index >= self.culprit else false_fail))

    def value(self, index: int, step: float) -> float:
        """A metric around 50 with noise 3, lower by `step` noises from the culprit on."""
        return float(50.0 - (3.0 * step if index >= self.culprit else 0.0) + 3.0 * self.random.normal())


Reading = tuple[Outcome, float | None]


def search(
    command: Command,
    likelihood: Likelihood,
    run: Callable[[int], Reading],
    jobs: int = 1,
    ready: Callable[[], Collection[str]] = tuple,
    in_step: bool = False,
) -> Trial:
    """Every result is used as it comes; a run takes between 0.8 and 1.2. Runs that are ended as worthless count as well.

    `in_step`: all runs take 1, and the ends are taken on trust, so that the time is the number of rounds.
    """
    good, last = "-1", command.commits - 1
    trusted = (good, str(last)) if in_step else ()
    line = Bayesian(good, [str(index) for index in range(command.commits)], likelihood, trusted=trusted)
    under_way: list[tuple[float, str]] = []
    runs, ends, clock = 0, 0, 0.0
    while runs + ends < MOST_RUNS:
        for commit in line.next_commits(jobs - len(under_way), [commit for _, commit in under_way], ready()):
            takes = 1.0 if in_step else command.random.uniform(0.8, 1.2)
            heapq.heappush(under_way, (clock + takes, commit))
            ends += int(commit) in (-1, last)
            runs += int(commit) not in (-1, last)
        if not under_way:
            break
        clock = under_way[0][0]
        while under_way and under_way[0][0] == clock:
            commit = heapq.heappop(under_way)[1]
            line.record(commit, *run(int(commit)))
        for worthless in line.worthless([commit for _, commit in under_way]):
            under_way.remove(next(entry for entry in under_way if entry[1] == worthless))
        heapq.heapify(under_way)
    found = None if line.refusal else line.result().culprit
    return Trial(found == str(command.culprit), runs, ends, clock)


def outcome(is_bad: bool) -> Reading:
    return (Outcome.BAD if is_bad else Outcome.GOOD), None


def flaky(
    seed: int, false_fail: float, false_pass: float, with_history: bool, jobs: int = 1, in_step: bool = False
) -> Trial:
    command = Command(seed, COMMITS)
    history = None
    if with_history:
        good_failed = int(command.random.binomial(PAST_GOOD, false_fail))
        bad_passed = int(command.random.binomial(PAST_BAD, false_pass))
        history = History(PAST_GOOD - good_failed, good_failed, bad_passed, PAST_BAD - bad_passed)

    def run(index: int) -> Reading:
        return outcome(command.fails(index, false_fail, false_pass))

    return search(command, PassFail(history), run, jobs, in_step=in_step)


def environments(seed: int, false_fail: float, false_pass: float) -> Trial:
    """An environment is built once for each state of the dependencies."""
    command = Command(seed, COMMITS)
    key_of = np.repeat(np.arange(len(DEPENDENCIES)), DEPENDENCIES)
    built: set[int] = set()

    def run(index: int) -> Reading:
        built.add(int(key_of[max(index, 0)]))
        return outcome(command.fails(index, false_fail, false_pass))

    def ready() -> set[str]:
        return {str(index) for index in np.flatnonzero(np.isin(key_of, list(built)))}

    trial = search(command, PassFail(), run, ready=ready)
    return Trial(trial.right, trial.runs, trial.ends, trial.time, len(built))


def metric(seed: int, step: float) -> Trial:
    command = Command(seed, METRIC_COMMITS)
    return search(command, Levels(-1), lambda index: (Outcome.BAD, command.value(index, step)))


def git_bisect(seed: int, false_fail: float, false_pass: float) -> Trial:
    command = Command(seed, COMMITS)
    good, bad, runs = -1, COMMITS - 1, 0
    while bad - good > 1:
        middle = (good + bad) // 2
        runs += 1
        if command.fails(middle, false_fail, false_pass):
            bad = middle
        else:
            good = middle
    return Trial(bad == command.culprit, runs)


def git_bayesect(seed: int, false_fail: float, false_pass: float) -> Trial:
    """As its command sets it up: the newest commit first, GOOD among them, no end run, until one commit has 0.95."""
    command = Command(seed, COMMITS)
    bisector = Bisector(np.ones(COMMITS + 1))
    runs = 0
    while bisector.distribution.max() < 0.95 and runs < MOST_RUNS:
        index = bisector.select()
        bisector.record(index, command.fails(COMMITS - 1 - index, false_fail, false_pass))
        runs += 1
    return Trial(COMMITS - 1 - int(bisector.distribution.argmax()) == command.culprit, runs)


def decision_ms(commits: int) -> float:
    """Processor time of the slowest decision of a search that is contradicted often, what it takes to draw the conclusions
    from the last run included."""
    command = Command(0, commits)
    line = Bayesian("-1", [str(index) for index in range(commits)], PassFail())
    slowest = 0.0
    for _ in range(100):
        started = time.process_time()
        chosen = line.next_commits(1)
        slowest = max(slowest, time.process_time() - started)
        if not chosen:
            break
        line.record(chosen[0], *outcome(command.fails(int(chosen[0]), 0.3, 0.3)))
    return 1000 * slowest
