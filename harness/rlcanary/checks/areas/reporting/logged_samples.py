"""The table of samples: prompts, completions and rewards that belong together."""

from collections import Counter
from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal, assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.rollouts import batch_of, group
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.reporting import LoggedSample, RolloutBatch


def _tables() -> Iterator[Case]:
    two = batch_of(group([1.0, 0.0]), step=1)
    yield Case("one prompt", batch=two, n_samples=2)
    # The completions of all prompts have the same texts, and the last prompt is the first one again.
    many = batch_of(
        group([1.0, 0.25], prompt=[11, 12]),
        group([0.5, 0.0, 0.75], prompt=[13], dataset="code"),
        group([0.0, 1.25], prompt=[11, 12]),
        trainer_version=4,
        step=7,
    )
    for n_samples in (1, 2, 3, 7, 10):
        yield Case(f"{n_samples} of 7", batch=many, n_samples=n_samples)
    yield Case("negative rewards", batch=batch_of(group([-1.0, -0.25]), step=2), n_samples=2)


@check("logged_samples.rows", severity="dashboard", needs=("logged_samples",), cases=_tables)
def rows(adapter: Adapter, batch: RolloutBatch, n_samples: int) -> None:
    """Each row of the table has a prompt, a completion of it, the reward of that completion and the update's number.

    Silent because a table is read by eye, and a neighbour's reward next to a completion sends its reader after a bug of the
    reward function. Look for lists that were shuffled, sorted or filtered apart, for completions of one rank next to the
    rewards of all, for prompts that are not repeated for each of their completions, and for dictionaries keyed by text.
    """
    shown = Counter(_row(sample) for sample in adapter.logged_samples(batch, n_samples))
    given = Counter(
        _row(LoggedSample(each.prompt_ids, completion.text or "", reward, batch.step))
        for each in batch.groups
        for completion, reward in zip(each.completions, each.rewards, strict=True)
    )
    wrong = list((shown - given).elements())
    told = f"{len(wrong)} rows of the table are not among the rollouts: {wrong[:1]}"
    assert_true(not wrong, told, quantity="rows", magnitude=len(wrong) / given.total(), compared=shown.total())
    expected = min(n_samples, given.total())
    told = f"the table of {n_samples} samples from {given.total()} completions has another number of rows"
    assert_equal(shown.total(), expected, told, quantity="number of rows")


def _row(sample: LoggedSample) -> tuple[tuple[int, ...], str, float, int]:
    return tuple(map(int, sample.prompt_ids)), sample.text, round(float(sample.reward), 4), int(sample.step)
