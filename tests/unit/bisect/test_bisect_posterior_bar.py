import pytest

from rlcanary.bisect.view.posterior_bar import posterior_bar


def test_commits_that_are_alike_make_an_even_bar_also_where_they_do_not_fit_the_columns() -> None:
    assert posterior_bar([1 / 99] * 99, 60) == "█" * 60
    assert posterior_bar([0.25] * 4, 60) == "████"


@pytest.mark.parametrize("width", [10, 60, 200])
def test_culprit_that_is_certain_stands_alone(width: int) -> None:
    bar = posterior_bar([0.0] * 50 + [1.0] + [0.0] * 69, width)
    assert len(bar) == min(width, 120)
    assert 1 <= len(bar.strip()) <= 2
    assert "█" in bar


def test_column_is_as_high_as_its_probability() -> None:
    assert posterior_bar([0.5, 0.25, 0.0, 0.125, 0.125], 5) == "█▄ ▂▂"
