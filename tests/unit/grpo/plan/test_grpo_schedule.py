"""The numbers of a schedule divide, or the plan is refused with the key that does not."""

import pytest

from rlcanary.grpo.plan.schedule import Schedule


def test_a_step_is_one_update_on_all_rows_unless_told_otherwise() -> None:
    schedule = Schedule(prompts_per_step=6, group_size=4)
    assert (schedule.rows_per_step, schedule.updates_per_step, schedule.micro_batches_per_update) == (24, 1, 1)
    assert schedule.required_staleness == 0


def test_updates_and_micro_batches_are_counted() -> None:
    schedule = Schedule(6, 4, rows_per_update=8, rows_per_micro_batch=2, sync_every=2, max_staleness=5)
    assert (schedule.updates_per_step, schedule.micro_batches_per_update, schedule.required_staleness) == (3, 4, 5)
    assert [schedule.syncs_after(step) for step in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "versions", "prompts"),
    [
        ({}, 0, 0),
        ({"max_staleness": 1}, 1, 6),
        ({"max_staleness": 3}, 3, 18),
        ({"rows_per_update": 8, "max_staleness": 2}, 0, 0),
        ({"rows_per_update": 8, "max_staleness": 4}, 0, 0),
        ({"rows_per_update": 8, "max_staleness": 5}, 1, 6),
        ({"sync_every": 2, "max_staleness": 3}, 1, 12),
    ],
)
def test_staleness_beyond_what_the_schedule_takes_is_used_to_sample_ahead(
    changes: dict[str, int], versions: int, prompts: int
) -> None:
    schedule = Schedule(**({"prompts_per_step": 6, "group_size": 4} | changes))
    assert (schedule.versions_ahead, schedule.prompts_ahead) == (versions, prompts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows_per_update": 10}, "rows_per_update is 10, which does not divide the 24 rows"),
        ({"rows_per_update": 6}, "rows_per_update is 6, which is no multiple of group_size 4"),
        ({"rows_per_update": 8, "max_staleness": 2, "rows_per_micro_batch": 3}, "rows_per_micro_batch is 3"),
        ({"rows_per_micro_batch": 7}, "rows_per_micro_batch is 7, which does not divide rows_per_update 24"),
        ({"rows_per_update": 8}, "max_staleness is 0, but with 3 updates per step and sync_every 1"),
        ({"sync_every": 2}, "max_staleness is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"rows_per_update": 0}, "rows_per_update is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"seq_len_buckets": (16, 16)}, "seq_len_buckets"),
    ],
)
def test_what_does_not_divide_is_refused_by_its_key(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule(**({"prompts_per_step": 6, "group_size": 4} | changes))
