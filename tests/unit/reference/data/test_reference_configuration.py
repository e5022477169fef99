"""A configuration is what is written, over the defaults."""

from typing import Any

import pytest

from rlcanary.reference.data.configuration import DEFAULTS, DERIVED, SETTINGS, effective


def test_settings_that_are_listed_are_those_with_a_default() -> None:
    assert {setting.name for setting in SETTINGS} == {*DEFAULTS, *DERIVED} == set(effective({}))
    assert {setting.name: setting.derived_from for setting in SETTINGS if setting.derived_from} == {
        name: (source,) for name, source in DERIVED.items()
    }


def test_written_values_stand_over_the_defaults() -> None:
    plain = {**DEFAULTS, **{name: DEFAULTS[source] for name, source in DERIVED.items()}}
    for setting in SETTINGS:
        for value in setting.values:
            expected = {**plain, setting.name: value}
            expected |= {name: value for name, source in DERIVED.items() if source == setting.name}
            assert effective({setting.name: value}) == expected


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ({"optimizer.learning_rate": "1e-6"}, 1e-6),
        ({"sampling.max_tokens": "16"}, 16),
        ({"optimizer.learning_rate": 1}, 1),
        ({"run.note": "1e5"}, "1e5"),
    ],
)
def test_number_that_is_written_as_text_is_a_number_and_other_text_stays(written: dict[str, Any], used: object) -> None:
    ((name, _),) = written.items()
    value = effective(written)[name]
    assert (value, type(value)) == (used, type(used))


@pytest.mark.parametrize(
    "written",
    [
        {"learning_rate": 1.0},
        {"optimizer": {"learning_rate": 1.0}},
        {"run.resume": "False"},
        {"run.resume": 0},
        {"sampling.max_tokens": True},
        {"sampling.max_tokens": 1.5},
        {"sampling.temperature": None},
        {"sampling.stop": "</answer>"},
        {"sampling.max_tokens": "many"},
    ],
)
def test_what_cannot_be_used_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        effective(written)


def test_results_share_no_list_with_each_other_or_the_defaults() -> None:
    first = effective({})
    first["sampling.stop"].append("x")
    assert first["evaluation.stop"] == effective({})["sampling.stop"] == DEFAULTS["sampling.stop"] == ["<end>"]
    written = ["a"]
    effective({"sampling.stop": written})["sampling.stop"].append("b")
    assert written == ["a"]
