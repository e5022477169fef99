"""Searches among commits that are not flaky alike: python benchmarks/bisection/uneven.py [--trials 600] [--only NAME ...]

All runs count, those of GOOD and BAD too. A search ends in one commit, in several suspects that it cannot tell apart, or
it is refused; the first two are right if one of the commits broke the command. Seeds start at 900,000: no constant of the
search was chosen on them.
"""

import argparse
import sys
from collections import Counter

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
ENDINGS = ("one commit", "several", "wrong commit", "wrong suspects", "refused")


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


def play(seed: int, commits: int, kind: str, amount) -> tuple[int, str]:
    """Search once. Returns the number of runs and the ending."""
    random = np.random.default_rng(seed)
    rate_C, culprits = failure_rates(random, commits, kind, amount)
    search = Bayesian("-1", [str(index) for index in range(commits)], PassFail())
    runs = 0
    while runs < MOST_RUNS and (chosen := search.next_commits(1)):
        runs += 1
        search.record(chosen[0], *outcome(bool(random.random() < rate_C[int(chosen[0]) + 1])))
    if search.refusal is not None:
        return runs, "refused"
    suspects = {int(sha) for sha in search.result().suspects}
    right, wrong = ("one commit", "wrong commit") if len(suspects) == 1 else ("several", "wrong suspects")
    return runs, right if suspects & culprits else wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=600, help="searches per row (default: 600)")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="NAME", help="only these rows")
    arguments = parser.parse_args()
    for name in arguments.only:
        played = [play(FIRST_SEED + trial, *CELLS[name]) for trial in range(arguments.trials)]
        runs, endings = zip(*played, strict=True)
        share = {ending: count / len(endings) for ending, count in Counter(endings).items()}
        shares = ", ".join(f"{ending} {share.get(ending, 0):.1%}" for ending in ENDINGS)
        right = share.get("one commit", 0) + share.get("several", 0)
        print(f"{name:45} {np.mean(runs):6.1f} runs, right {right:6.1%}: {shares}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
