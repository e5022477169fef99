"""Plays rlcanary's story on real parts: from a planted silent bug to the commit that planted it.

Everything happens in a temporary folder: a repository that `history.py` builds, real runs of its tests with our
plugins on, the real conformance checks, the real bisect.
"""

import argparse
import json
import math
import re
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from history import History, build
from nights import AT_ONCE, run_on_commits
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from stage import WIDTH, PlayError, Stage, failure

HERE = Path(__file__).resolve().parent
BISECT = HERE.parent / "bisect-run.sh"
ADAPTER = "canary.py"
TEST = "test_train::test_reward_rises"
METRIC = "advantage_abs_mean"
RESULTS = "../nightly/unit_results"
AUDITED = "audited.py"
BUNDLES = "../canary"


@dataclass(frozen=True)
class Verdict:
    """The result of the story.

    Attributes:
        planted: The commit that plants the bug, according to `history.py`.
        named: The commit that the bisect named.
        failed_checks: The conformance checks that fail on the newest commit.
        counterexample: The actual and expected values of the first failed check.
        nights: The commit and the metric of each nightly run. All of them are green.
        finding: What the audit of a training run says.
        asked: The exit code of the replay of its bundle on the named commit, and on the commit before it.
    """

    planted: str
    named: str
    failed_checks: list[str]
    counterexample: str
    nights: list[tuple[str, float]]
    finding: str
    asked: list[int]


def tell(stage: Stage, nights: int) -> Verdict:
    """Tells the whole story and returns its result."""
    with stage.step(
        "A codebase with a silent bug in its history",
        "tinygrpo trains a tiny transformers language model with GRPO. It has 40 commits, and one of them plants a bug "
        "that TRL once shipped (#3992). Its own tests do not notice.",
    ):
        history = build_codebase(stage)
    with stage.step(
        "Night after night everything is green",
        "The same tests run on commits all over the history, with the rlcanary plugins on. Every run leaves a results "
        "file with the metrics that the tests tracked.",
    ):
        measured = run_nights(stage, history, nights)
    with stage.step(
        "The conformance checks are not fooled",
        f"An adapter of about 40 lines, {ADAPTER}, says what the code means to do and how to call it. With it, pytest "
        "also compares the team's own functions with a reference, on small inputs.",
    ):
        failed_checks, counterexample = check_newest(stage)
    with stage.step(
        "The bisect names the commit",
        "A failing check tells good commits from bad ones, so a bisect finds where it began. It works in a worktree of "
        "its own; the checkout is not touched.",
    ):
        named = bisect(stage, history)
    with stage.step(
        "The step was in the metrics all along",
        "The history of the nightly runs agrees: no test ever failed, but what one of them measured jumped.",
    ):
        show_trend(stage)
    with stage.step(
        "During a run, the audit needs one update",
        "No check was run here: the audit stands in the training run of the newest commit, and recomputes its advantages. "
        "What it finds is a bundle, which any commit can be asked to take again, as a bisect does.",
    ):
        finding, asked = audit_run(stage, named)
    return Verdict(history.planted, named, failed_checks, counterexample, measured, finding, asked)


def build_codebase(stage: Stage) -> History:
    with stage.progress("building the repository"):
        history = build(stage.repository)
    shutil.copy(HERE / ADAPTER, stage.repository)
    stage.show_command("git log --oneline | head -5")
    stage.show(stage.git("log", "--oneline", "-5"))
    stage.console.print()
    with stage.progress("running its own tests on the newest commit"):
        tests = stage.run(["pytest", "-q"])
    stage.show_command("pytest -q")
    stage.show(tests.stdout.splitlines()[-1], style="green")
    return history


def run_nights(stage: Stage, history: History, nights: int) -> list[tuple[str, float]]:
    """Runs the codebase's tests on commits spread over the history; returns each commit and its metric."""
    newest = len(history.commits) - 1
    commits = [history.commits[round(night * newest / (nights - 1))] for night in range(nights)]
    stage.show_command(f"pytest -q --train-seed=$NIGHT --rlcanary-results={RESULTS}.json")
    runs = [
        (commit, ["pytest", "-q", f"--train-seed={night}", f"--rlcanary-results={RESULTS}.json"])
        for night, commit in enumerate(commits)
    ]
    with stage.progress(f"{nights} nightly runs, {AT_ONCE} at a time", total=nights) as progress:
        run_on_commits(stage, runs, on_finished=lambda: progress.advance(progress.task_ids[0]))
    results = [json.loads(path.read_text()) for path in sorted((stage.repository / RESULTS).glob("*.json"))]
    rewards = [result["metrics"][TEST]["reward"] for result in results]
    if len(rewards) != nights or not all(map(math.isfinite, rewards)):
        raise PlayError(f"{nights} nights left these mean rewards: {rewards}")
    verdict = f"{nights} of {nights} nights green: the loss stayed finite and the reward rose in every training run"
    stage.show(verdict, style="green")
    return [(result["git_commit"], result["metrics"][TEST][METRIC]) for result in results]


def check_newest(stage: Stage) -> tuple[list[str], str]:
    """Runs the codebase's tests and the checks on the newest commit.

    Returns:
        The checks that fail, and the first one's counterexample.
    """
    command = ["pytest", "-q", f"--canary={ADAPTER}"]
    stage.show_command(shlex.join(command))
    with stage.progress("its own tests and the conformance checks on the newest commit"):
        output = stage.run(command, allowed=(1,)).stdout
    failed = re.findall(r"^FAILED .*::(\w+\.\w+)", output, re.MULTILINE)
    got = re.search(r"^ +got: +(.*)\n +expected: +(.*)$", output, re.MULTILINE)
    if not (failed and got):
        raise failure(command, 1, output)
    # A failure's report begins with a heading in underscores and ends where the next one begins.
    reports = re.split(r"^(?=_{3,} .* _{3,}$|={3,} short test summary)", output, flags=re.MULTILINE)
    stage.show(reports[1])
    stage.console.print()
    stage.show(output[output.index("FAILED ") :], style="red")
    return failed, f"got {got[1]}, expected {got[2]}"


def bisect(stage: Stage, history: History) -> str:
    """Bisects with the failing check from the oldest commit to the newest, and returns the commit that it names."""
    check = ["rlcanary", "check", ADAPTER, "--only", "advantage"]
    good = history.commits[0][:10]
    stage.show_command(f"GOOD={good} BAD=HEAD tools/bisect-run.sh {shlex.join(check)}")
    command = [str(BISECT), *check]
    # The bisect draws its progress on stderr, which goes to our console.
    done = stage.run(command, GOOD=good, BAD="HEAD", stderr=sys.stdout)
    found = re.search(r"^([0-9a-f]{40}) is the first bad commit$", done.stdout, re.MULTILINE)
    if not found:
        raise failure(command, done.returncode, done.stdout)
    named = found[1]
    stage.console.print()
    stage.show(found[0], style="bold red")
    # The rest repeats the runs as a table.
    stage.show(done.stdout[found.end() + 1 :].partition("Evidence")[0])
    stage.console.print()
    stage.show_command(f"git show {named[:10]} -- tinygrpo/advantages.py")
    diff = stage.git("show", "--format=", named, "--", "tinygrpo/advantages.py")
    hunk = diff[diff.index("@@") :]
    stage.console.print(Syntax(hunk.rstrip(), "diff", theme="ansi_dark", background_color="default"))
    return named


def audit_run(stage: Stage, named: str) -> tuple[str, list[int]]:
    """Trains with the audit on the newest commit, and replays its bundle on the named commit and the one before.

    Returns:
        The finding, and the exit codes of the replays.
    """
    shutil.copy(HERE / AUDITED, stage.repository)
    train = ["python", AUDITED, BUNDLES]
    stage.show_command(shlex.join(train))
    with stage.progress("three steps of training"):
        output = stage.run(train).stdout
    *steps, finding = output.splitlines()
    stage.show("\n".join(steps))
    stage.show(finding, style="red")
    replay = ["rlcanary", "replay", f"{BUNDLES}/rollout-0", "--adapter", ADAPTER]
    asked = []
    for commit in (named, f"{named}^"):
        stage.git("checkout", "--quiet", "--detach", commit)
        stage.console.print()
        stage.show_command(f"git checkout {commit[:10]}{commit[40:]} && {shlex.join(replay)}")
        with stage.progress("the advantages of the bundle, as this commit computes them"):
            done = stage.run(replay, allowed=(0, 1))
        stage.show(done.stdout)
        asked.append(done.returncode)
    stage.git("checkout", "--quiet", "main")
    stage.console.print()
    stage.console.print("The same command names the commit:", highlight=False)
    stage.show_command(f"GOOD=… BAD=HEAD tools/bisect-run.sh {shlex.join(replay)}")
    return finding, asked


def show_trend(stage: Stage) -> None:
    name = f"{TEST}.{METRIC}"
    trend = ["rlcanary", "trend", name, "--dir", RESULTS]
    stage.show_command(shlex.join(trend))
    stage.show(stage.run(trend, **stage.colours()).stdout)
    stage.console.print()
    query = f'.metrics["{TEST}"].{METRIC}'
    if shutil.which("jq"):
        stage.show_command(f"jq {shlex.quote(query)} {RESULTS}/*.json")
        files = sorted((stage.repository / RESULTS).glob("*.json"))
        stage.show(stage.run(["jq", query, *map(str, files)]).stdout)
    else:
        with_jq = ["rlcanary", "trend", "--dir", RESULTS, "--jq", query]
        stage.show_command(shlex.join(with_jq))
        stage.show(stage.run(with_jq).stdout)


def summarise(stage: Stage, verdict: Verdict, seconds: float) -> None:
    def commit(sha: str) -> str:
        return stage.git("log", "-1", "--format=%h %s", "--abbrev=10", sha).strip()

    right = verdict.named == verdict.planted
    mark = Text("the planted one", style="bold green") if right else Text("NOT the planted one", style="bold red")
    nights = len(verdict.nights)
    lines = Table.grid(padding=(0, 2))
    lines.add_row("Planted", commit(verdict.planted))
    lines.add_row("", "Advantages are no longer divided by the spread of their group, as in TRL #3992.")
    lines.add_row(
        "All along", f"Training ran, the reward rose, the codebase's own tests were green: {nights} of {nights} nights."
    )
    lines.add_row("Found by", f"{verdict.failed_checks[0]}: {verdict.counterexample}")
    lines.add_row("Named", Text.assemble(commit(verdict.named), " (", mark, ")"))
    lines.add_row(
        "Seen in", f"{METRIC}: {verdict.nights[0][1]:.2f} on the first night, {verdict.nights[-1][1]:.2f} on the last"
    )
    lines.add_row("In a run", verdict.finding)
    lines.add_row("Time", f"{seconds:.0f} s")
    stage.console.print()
    title = "From a silent bug to its commit"
    stage.console.print(Panel(lines, title=title, border_style="green" if right else "red"), highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Play the story from a planted silent bug to the commit that planted it."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came out here")
    parser.add_argument("--keep", action="store_true", help="keep the folder, to look around in it")
    parser.add_argument("--nights", type=int, default=10, metavar="N", help="nightly runs to make (default: 10)")
    options = parser.parse_args()
    if options.nights < 2:
        parser.error("--nights: a history takes two nights at least")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    home = Path(tempfile.mkdtemp(prefix="rlcanary-demo-"))
    stage = Stage(console, home)
    started = time.perf_counter()
    try:
        verdict = tell(stage, options.nights)
        seconds = time.perf_counter() - started
        summarise(stage, verdict, seconds)
    except PlayError as error:
        print(f"play.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep:
            console.print(f"Kept: {home}", highlight=False)
        else:
            shutil.rmtree(home)
    if options.json:
        document = asdict(verdict) | {"seconds": round(seconds, 1), "steps": stage.seconds}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if verdict.named == verdict.planted else 1


if __name__ == "__main__":
    sys.exit(main())
