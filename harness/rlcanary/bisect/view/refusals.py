"""Explain why a search cannot start from its ends, and what to do."""

from rlcanary.bisect.line.merges import Inside
from rlcanary.bisect.record.journal import Journal, Observation
from rlcanary.bisect.runs.measured_value import NO_VALUE
from rlcanary.bisect.search.verdict import Refusal
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.git import Commit

NOT_FOUND = ("exit 126", "exit 127")


class Refused(Exception):
    """The search cannot start from these ends."""


def explain(
    refusal: Refusal, good: Commit, good_name: str, bad: Commit, journal: Journal, worse: str | None = None
) -> str:
    """Explain a refusal. `worse` is the metric's worse direction, lower or higher, in a search for a metric."""
    observations = journal.observations()
    of_good = [observation for observation in observations if observation.commit == good.sha]
    of_bad = [observation for observation in observations if observation.commit == bad.sha]
    if refusal is Refusal.ALIKE:
        if worse and (opposite := _is_opposite(of_good, of_bad, worse)):
            return f"BAD is {opposite} than GOOD, not {worse} (--worse): GOOD {_tally(of_good)}, BAD {_tally(of_bad)}"
        return (
            f"GOOD and BAD cannot be told apart: GOOD {_tally(of_good)}, BAD {_tally(of_bad)}; give ends that differ more, "
            "or a command that tells them apart"
        )
    end, name, runs = (good, good_name, of_good) if refusal.startswith("good") else (bad, "BAD", of_bad)
    title = f"{name} ({end.short} {end.subject})"
    last = runs[-1]
    if refusal in (Refusal.GOOD_UNTESTABLE, Refusal.BAD_UNTESTABLE):
        return f"{title} cannot be tested: {last.reason}; {_advice(of_good, of_bad, last)}"
    wrong = Outcome.GOOD if refusal is Refusal.BAD_PASSES else Outcome.BAD
    reason = next((run.reason for run in reversed(runs) if run.outcome is wrong), last.reason)
    how = reason if len(runs) == 1 else f"{reason}, {_tally(runs)}"
    if refusal is Refusal.BAD_PASSES:
        return f"{title} passes ({how}): nothing is broken there; give a commit where the command fails"
    if name != "GOOD":
        return (
            f"{title} already fails ({how}): it broke before the histories of GOOD and BAD split, and GOOD has a fix; "
            "give an older GOOD on BAD's first-parent line"
        )
    return f"{title} fails ({how}): give an older commit where the command passes"


def explain_merge(refusal: Refusal, inside: Inside, journal: Journal) -> str:
    """Explain why the search ended at a merge instead of a commit that it brought in."""
    tip, base = inside.commits[-1], inside.good
    if refusal is Refusal.BAD_PASSES:
        return "both parents pass, and their merge fails"
    if refusal is Refusal.ALIKE:
        return "its branch is no worse than the branch's base, but the merge is"
    if refusal is Refusal.GOOD_FAILS:
        return f"the base of its branch ({base.short} {base.subject}) fails as well: runs cannot tell which commit broke it"
    end, name = (base, "the base of its branch") if refusal is Refusal.GOOD_UNTESTABLE else (tip, "its branch")
    reason = [observation.reason for observation in journal.observations() if observation.commit == end.sha][-1]
    return f"{name} ({end.short} {end.subject}) cannot be tested: {reason}. Any commit of its branch may be the culprit"


def _advice(of_good: list[Observation], of_bad: list[Observation], last: Observation) -> str:
    if all(runs and runs[-1].reason.startswith(NOT_FOUND) for runs in (of_good, of_bad)):
        return "nor can BAD: check the command's spelling, its PATH and that it is executable"
    if last.reason.startswith(NOT_FOUND):
        return "give a commit that has it (--good-when-added PATH finds one), or skip its test with --skip-good-check"
    if NO_VALUE in last.reason:
        return "check the name after --metric, or choose another commit near it"
    if "timed out" in last.reason:
        return "give a longer --timeout; if the hang is what you search for, add --on-timeout bad"
    if last.reason.startswith("killed by"):
        return "the process was killed, often for lack of memory: run it on a machine that has enough"
    if "environment" in last.reason:
        return "fix that, name a build command with --env 'COMMAND', or use your own environment with --env none"
    return "choose another commit near it"


def _is_opposite(of_good: list[Observation], of_bad: list[Observation], worse: str) -> str | None:
    """Return the metric's actual direction if it plainly differs from the requested one."""
    good = [run.value for run in of_good if run.value is not None]
    bad = [run.value for run in of_bad if run.value is not None]
    if worse == "lower" and good and bad and min(bad) > max(good):
        return "higher"
    if worse == "higher" and good and bad and max(bad) < min(good):
        return "lower"
    return None


def _tally(runs: list[Observation]) -> str:
    """Format a count such as "passed 2 of 3 runs"."""
    if any(run.outcome is Outcome.MEASURED for run in runs):
        values = ", ".join(f"{run.value:.4g}" for run in runs if run.value is not None)
        return f"measured {values}"
    tried = [run for run in runs if run.outcome in (Outcome.GOOD, Outcome.BAD)]
    passed = sum(run.outcome is Outcome.GOOD for run in tried)
    return f"passed {passed} of {len(tried)} runs"
