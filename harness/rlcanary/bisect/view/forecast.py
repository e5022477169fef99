"""Estimate the runs, time and environment builds of a search before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rlcanary.bisect.line.stage import make_stage
from rlcanary.bisect.plan import Plan
from rlcanary.bisect.record.journal import readable_records
from rlcanary.bisect.request import Request
from rlcanary.bisect.runs.environments import EnvironmentCache, default_cache_folder
from rlcanary.bisect.view.progress import duration
from rlcanary.jobs.outcomes import Outcome

PLACES = 7
"""The number of culprit positions at which the search is simulated."""


@dataclass(frozen=True)
class Forecast:
    """Expected cost of a search with a command that never flakes: means over positions of the culprit."""

    runs: float
    rounds: float
    """Rounds of --jobs parallel runs."""
    builds: float | None
    """Builds of missing environments. None if no environments are built."""
    keys: int
    seconds_a_run: float | None
    """The median duration of runs in earlier searches with this command. None without one."""

    @property
    def seconds(self) -> float | None:
        return None if self.seconds_a_run is None else self.rounds * self.seconds_a_run


def make_forecast(request: Request, plan: Plan) -> Forecast:
    count = len(plan.commits)
    places = sorted({round((place + 0.5) * count / PLACES - 0.5) for place in range(PLACES)})
    built: set[str] = set()
    if plan.builder is not None:
        folder = request.env_dir or default_cache_folder()
        built = EnvironmentCache(folder, plan.builder, plan.keys).built()
    played = [_play(request, plan, place, built) for place in places]
    return Forecast(
        fmean(runs for runs, _, _ in played),
        fmean(rounds for _, rounds, _ in played),
        None if plan.builder is None else fmean(builds for _, _, builds in played),
        len(set(plan.keys.values())),
        _seconds_a_run(request.command, plan),
    )


def _play(request: Request, plan: Plan, culprit: int, built: set[str]) -> tuple[int, int, int]:
    """Simulate a search whose culprit has this index. Returns its runs, rounds and builds."""
    stage = make_stage(request, plan.repository, plan.good, plan.good_name, plan.commits, trusted=plan.trusted)
    position = {commit.sha: index for index, commit in enumerate(plan.commits)} | {plan.good.sha: -1}
    ready = {plan.keys[sha] for sha in built}
    runs = rounds = builds = 0
    while wanted := stage.search.next_commits(request.jobs, (), [sha for sha in plan.keys if plan.keys[sha] in ready]):
        rounds += 1
        for sha in wanted:
            runs += 1
            if plan.keys and plan.keys[sha] not in ready:
                builds += 1
                ready.add(plan.keys[sha])
            bad = position[sha] >= culprit
            if request.metric is None:
                stage.search.record(sha, Outcome.BAD if bad else Outcome.GOOD, None)
            else:
                # A step of three standard deviations, with noise that repeats from search to search.
                noise = ((runs * 0.618) % 1 - 0.5) * 3.4641
                side = 3.0 if request.worse == "higher" else -3.0
                stage.search.record(sha, Outcome.MEASURED, noise + side * bad)
    return runs, rounds, builds


def _seconds_a_run(command: Sequence[str], plan: Plan) -> float | None:
    store = plan.repository.common_dir / "rlcanary" / "bisect"
    seconds: list[float] = []
    # The search itself reports unreadable journals.
    for record in readable_records(sorted(store.glob("*/journal.jsonl"), reverse=True), tell=lambda _: None):
        header = record.header
        if header is not None and header.command == tuple(command):
            seconds += [observation.seconds for observation in record.observations() if observation.run]
    return median(seconds) if seconds else None


def forecast_lines(forecast: Forecast, plan: Plan) -> list[str]:
    """Format the forecast for people."""
    runs, rounds = round(forecast.runs), round(forecast.rounds)
    lines = [
        f"GOOD {plan.good.short} {plan.good.subject}",
        f"BAD  {plan.bad.short} {plan.bad.subject}",
        *plan.notices,
        f"{len(plan.commits)} commit{'s' * (len(plan.commits) > 1)} to choose from: about {runs} runs in {rounds} rounds, "
        "more if the command is flaky",
    ]
    if forecast.seconds_a_run is not None and forecast.seconds is not None:
        lines.append(
            f"about {duration(forecast.seconds)}, at {duration(forecast.seconds_a_run)} a run as in earlier searches"
        )
    else:
        lines.append("the duration of a run is unknown: this command was not bisected here before")
    if forecast.builds is not None:
        lines.append(f"about {forecast.builds:.0f} environment builds, of {forecast.keys} sets of dependencies")
    return lines
