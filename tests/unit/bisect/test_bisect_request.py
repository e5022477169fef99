"""The options of `rlcanary bisect`, as another start of the search repeats them."""

from rlcanary.bisect.request import Request


def test_numbers_are_repeated_to_the_last_digit() -> None:
    request = Request(("x",), confidence=0.9999999, timeout=1234567.0, worse="1.0", budget_minutes=0.5)
    assert request.words() == ["--timeout", "1234567", "--confidence", "0.9999999", "--worse", "1.0"]
