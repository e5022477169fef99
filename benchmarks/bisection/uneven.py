"""Searches among commits that are not flaky alike: python benchmarks/bisection/uneven.py [--trials 600] [--only NAME ...]

All runs count, those of GOOD and BAD included. A search is right if its commit, or one of the suspects that it cannot tell
apart, broke the command. A search that refuses to start is not right. Seeds start at 900,000: no constant of the search was
chosen on them.
"""

import argparse
import sys

import numpy as np
from searches import MOST_RUNS, outcome

from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.pass_fail_noise import PassFail

FIRST_SEED = 900_000
CELLS = {
    "5 % of the commits always lie": (128, "lies", 0.05),
    "10 % of the commits always lie": (128, "lies", 0.1),
    "flake rates of Beta(0.5, 4.5)": (128, "rates", 5.0),
    "flake rates of Beta(1, 9)": (128, "rates", 10.0),
    "one breaks half of the runs, a later one all": (128, "two", 0.0),
    "the same, and 10 % flakes": (128, "two", 0.1),
    "mended and broken again": (128, "mended", 0.0),
    "fades to 50 %, 10 % flakes": (128, "fades", 0.1),
    "0/0": (1024, "flakes", (0.0, 0.0)),
    "5/5": (1024, "flakes", (0.05, 0.05)),
    "10/10": (1024, "flakes", (0.1, 0.1)),
    "30/0": (1024, "flakes", (0.3, 0.0)),
    "0/30": (1024, "flakes", (0.0, 0.3)),
    "30/30": (1024, "flakes", (0.3, 0.3)),
}
"""Number of commits, kind and amount of noise."""


def failure_rates(random: np.random.Generator, commits: int, kind: str, amount) -> tuple[np.ndarray, set[int]]:
    """Draw the failure rate of GOOD and of each commit, and the commits that break the command."""
    culprit = int(random.integers(commits))
    index_C = np.arange(-1, commits)
    is_bad_C = index_C >= culprit
    culprits = {culprit}
    if kind == "flakes":
        rate_C = np.where(is_bad_C, 1 - amount[1], amount[0])
    elif kind == "lies":
        lies_C = random.random(commits + 1) < amount
        lies_C[[0, -1]] = False  # GOOD and BAD are what they are called.
        rate_C = (is_bad_C ^ lies_C).astype(float)
    elif kind == "rates":
        flake_C = random.beta(0.1 * amount, 0.9 * amount, commits + 1)
        rate_C = np.where(is_bad_C, 1 - flake_C, flake_C)
    elif kind == "two":
        first, second = sorted(int(index) for index in random.choice(commits, 2, replace=False))
        culprits = {first, second}
        rate_C = np.where(index_C >= second, 1 - amount, np.where(index_C >= first, 0.5, amount))
    elif kind == "mended":
        first, mended, second = sorted(int(index) for index in random.choice(commits - 1, 3, replace=False))
        culprits = {first, second}
        rate_C = (((index_C >= first) & (index_C < mended)) | (index_C >= second)).astype(float)
    else:
        faded_C = (index_C - culprit) / max(1, commits - 1 - culprit)
        rate_C = np.where(is_bad_C, 1 - amount - (0.5 - amount) * faded_C, amount)
    return rate_C, culprits


def play(seed: int, commits: int, kind: str, amount) -> tuple[int, bool, int]:
    """Search once. Returns the number of runs, whether the search is right, and how many suspects are left."""
    random = np.random.default_rng(seed)
    rate_C, culprits = failure_rates(random, commits, kind, amount)
    search = Bayesian("-1", [str(index) for index in range(commits)], PassFail())
    runs = 0
    while runs < MOST_RUNS and (chosen := search.next_commits(1)):
        runs += 1
        search.record(chosen[0], *outcome(bool(random.random() < rate_C[int(chosen[0]) + 1])))
    suspects = {int(sha) for sha in search.result().suspects}
    return runs, search.refusal is None and bool(suspects & culprits), len(suspects)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=600, help="searches per row (default: 600)")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="NAME", help="only these rows")
    arguments = parser.parse_args()
    for name in arguments.only:
        played = [play(FIRST_SEED + trial, *CELLS[name]) for trial in range(arguments.trials)]
        runs, right, left = (np.array(column) for column in zip(*played, strict=True))
        sets = f"several suspects {np.mean(left > 1):.0%}"
        sets += f" ({left[left > 1].mean():.1f} in the mean)" if (left > 1).any() else ""
        print(f"{name:45} {runs.mean():6.1f} runs, right {right.mean():6.1%}, {sets}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
