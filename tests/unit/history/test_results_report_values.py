"""The numbers that the page of results shows."""

import pytest

from rlcanary.history.report import plotted_values


def test_values_beside_one_that_is_far_away_are_shown_as_they_are() -> None:
    assert plotted_values([0.512, None, 1e6, 3.25e-5]) == [0.512, None, 1e6, 3.25e-5]


def test_digits_that_no_plot_shows_are_left_out() -> None:
    assert plotted_values([0.123456789, 0.623456789]) == [0.1235, 0.6235]
    assert plotted_values([1000.123456, 1000.123556]) == pytest.approx([1000.123456, 1000.123556], abs=1e-8)
    assert plotted_values([2.0, 2.0]) == [2.0, 2.0]
