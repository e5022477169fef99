"""The checks kill every mutant of a random sample of the oracle that is not equivalent."""

from rlcanary.mutants.equivalents import equivalents
from rlcanary.mutants.gather import drawn, gather
from rlcanary.mutants.killing import kill

# The modules whose mutants are all killed or reviewed, and the checks that do it.
MODULES = ["reference.filters", "reference.masks", "reference.ordering", "reference.rollout", "reference.scoring"]
CHECKS = ("mask.", "eos.", "batch.", "filter.", "order.", "schedule.", "reward.", "rollout.", "rendering.")
SEED, MUTANTS = 0, 30


def test_checks_kill_a_random_sample_of_mutants() -> None:
    listed = {entry.id for entry in equivalents()}
    found = [trial for trial in gather("reference", MODULES, CHECKS) if trial.mutant.id not in listed]
    left = [
        trial.mutant.id
        for trial, fate in kill(drawn(found, MUTANTS, SEED), workers=1)
        if fate.verdict in ("survived", "unreached")
    ]
    assert left == []
