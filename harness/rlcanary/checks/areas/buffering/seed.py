"""Seeds of rollouts: no two ranks or requests of a step draw the same, and a resumed run draws as it would have."""

import copy
from collections import Counter
from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal, leave_out, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.training.states import seeded
from rlcanary.contract.adapter import Adapter


def _seeds() -> Iterator[Case]:
    for seed in (0, 1, 42):
        yield Case(f"seed {seed}", seed=seed)


@check("seed.distinct", needs=("rollout_seed",), cases=_seeds)
def distinct(adapter: Adapter, seed: int) -> None:
    """Within a step no two ranks and no two requests draw with the same seed, and each step draws anew.

    Silent because each completion looks right alone: with one seed for all ranks, data-parallel engines sample the same
    completions of a prompt, a group holds copies, and the batch is smaller than it seems. With one seed for all steps a
    prompt that comes again is answered as before. Look for a seed that is set once for all workers, and for sums such as
    seed + rank + request, in which rank 1's first request is rank 0's second.
    """
    of_step = {
        step: {
            (rank, request): int(adapter.rollout_seed(seed, rank, step, request))
            for rank in range(4)
            for request in range(4)
        }
        for step in (0, 1, 2, 100)
    }
    for step, seeds in of_step.items():
        counts = Counter(seeds.values())
        alike = [place for place, each in seeds.items() if counts[each] > 1]
        told = f"at step {step} of a run with seed {seed}, (rank, request) that share a seed with another one"
        assert_equal(alike, [], told, quantity="seeds of a step")
    again = [
        (place, step)
        for step, seeds in of_step.items()
        for place in seeds
        if step and seeds[place] == of_step[0][place]
    ]
    told = f"in a run with seed {seed}, ((rank, request), step) with the seed that they have at step 0"
    assert_equal(again, [], told, quantity="seeds of steps")


@check("seed.repeatable", needs=("rollout_seed",))
def repeatable(adapter: Adapter) -> None:
    """A seed depends on the run's seed, rank, step and request, and on nothing else: a resumed run draws as without a stop.

    Silent because nobody compares the samples of a resumed run with those that it would have drawn. Look for a counter of
    requests, for the global random state, and for a run's seed that is not used.
    """
    places = [(0, 0, 0), (1, 0, 2), (0, 3, 1)]
    later = unless_raised(copy.deepcopy, adapter)
    for rank, step, request in places:
        before = seeded(adapter.rollout_seed, 7, rank, step, request, seed=1)
        told = f"with rank {rank}, step {step} and request {request}"
        again = seeded(adapter.rollout_seed, 7, rank, step, request, seed=2)
        assert_equal(again, before, f"{told}, asked again in another random state: the seed", quantity="seed")
        other = adapter.rollout_seed(8, rank, step, request)
        assert_equal(
            other != before, True, f"{told}, a run with another seed has another one", quantity="seed of another run"
        )
    if later is None:
        leave_out("the adapter cannot be copied, as it is in a new process")
        return
    new = seeded(later.rollout_seed, 7, *places[-1], seed=3)
    assert_equal(new, before, f"{told}, asked first in a new process: the seed", quantity="seed in a new process")
