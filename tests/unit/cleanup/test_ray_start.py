"""A Ray cluster that a busy machine is too slow to start is started again."""

import pytest

from rlcanary.cleanup.ray_start import start_ray

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


def failing(times: int, message: str = SLOW):
    """A start that fails so often; Ray's own cannot be made slow on demand."""
    attempts = []

    def start():
        attempts.append(None)
        if len(attempts) <= times:
            raise RuntimeError(message)
        return len(attempts)

    return start


def test_a_cluster_that_was_too_slow_is_started_again():
    assert start_ray(failing(2)) == 3


def test_no_attempt_starts_after_the_limit():
    with pytest.raises(RuntimeError, match="timed out during startup"):
        start_ray(failing(1), limit_s=0.0)


def test_another_failure_is_not_tried_again():
    with pytest.raises(RuntimeError, match="no such address"):
        start_ray(failing(1, "no such address"))
