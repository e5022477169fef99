"""The checks kill every mutant of a random sample of the oracle that is not equivalent."""

import subprocess
import sys

# The modules whose mutants are all killed or reviewed, and the checks that do it.
MODULES = [
    "reference.data.filters",
    "reference.masks",
    "reference.data.ordering",
    "reference.data.run_plan",
    "reference.rollout",
    "reference.data.scoring",
]
CHECKS = ["mask.", "eos.", "batch.", "filter.", "order.", "schedule.", "plan.", "reward.", "rollout.", "rendering."]


def test_checks_kill_a_random_sample_of_mutants() -> None:
    command = [sys.executable, "-m", "rlcanary", "mutants", "--adapter=reference", "--sample=30", "--seed=0", "-n", "1"]
    chosen = [*(f"--module={module}" for module in MODULES), *(f"--only={prefix}" for prefix in CHECKS)]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
