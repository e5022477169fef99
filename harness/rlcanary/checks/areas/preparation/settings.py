"""Settings: what is written in a configuration is what the run uses.

The adapter lists settings with values that may be written; the checks write them.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_true, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.preparation import Setting

NEEDS = ("list_settings", "effective")


def _plain(value: Any) -> Any:
    """Write tuples and other sequences as lists, and mappings as dictionaries."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(each) for each in value]


def _used(adapter: Adapter, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a run uses with these settings written."""
    used = adapter.effective(copy.deepcopy(written))
    return {setting.name: copy.deepcopy(_plain(used[setting.name])) for setting in adapter.list_settings()}


def _listed(adapter: Adapter) -> list[Setting]:
    settings: list[Setting] = adapter.list_settings()
    if not any(setting.values for setting in settings):
        raise NothingToCompare("no setting is listed with a value")
    # Where even this is refused, the refusal of anything else says nothing.
    adapter.effective({})
    return settings


@check("settings.written_is_used", needs=NEEDS)
def written_is_used(adapter: Adapter) -> None:
    """Each listed value that is written is used, alone and together with others: also 0, False, None, "" and [].

    Silent because the default works too: a learning rate, a stop text or a checkpoint to resume from is written in the
    configuration, is in the log, and is not what the run uses. Look for `x or default`, for options that are declared
    and never read, for a part of the program that has a default of its own, and for settings that only one of two ways
    through the code passes on.
    """
    settings = _listed(adapter)
    for setting in settings:
        for value in setting.values:
            got = _used(adapter, {setting.name: value})[setting.name]
            told = f"{setting.name}={value!r} is written and another value used"
            with soft():
                assert_equal(got, _plain(value), told, quantity=f"{setting.name}={value!r}")
    for place in (0, -1):
        written = {setting.name: setting.values[place] for setting in settings if setting.values}
        used = unless_raised(_used, adapter, written) or written
        for name, value in written.items():
            told = f"with {written} written, another {name} is used"
            with soft():
                assert_equal(_plain(used[name]), _plain(value), told, quantity=f"{name} with others")


@check("settings.other_settings_stay", needs=NEEDS)
def other_settings_stay(adapter: Adapter) -> None:
    """Writing one setting leaves the others as they were, but for those that are derived from it, which follow.

    Silent because each setting is right when it is written, and another has changed with it: a nested group that is replaced
    as a whole and loses what it takes from another, or an evaluation that keeps a limit of its own where it is declared to
    take the training's. Look for `update` on nested dictionaries, and at which defaults are computed and when.
    """
    settings, defaults = _listed(adapter), _used(adapter, {})
    for written in settings:
        users = {setting.name for setting in settings if written.name in setting.derived_from}
        followed = set()
        for value in written.values:
            used = _used(adapter, {written.name: value})
            moved = {name for name, default in defaults.items() if used[name] != default} - {written.name}
            told = f"writing {written.name}={value!r} changes the defaults of settings that are not derived from it"
            assert_equal(sorted(moved - users), [], told, quantity=f"others than {written.name}")
            followed |= moved
        told = f"settings that are derived from {written.name} have the same default with each of {written.values}"
        has_changed = any(_plain(value) != defaults[written.name] for value in written.values)
        assert_equal(sorted(users - followed) if has_changed else [], [], told, quantity=f"derived from {written.name}")
    for written in settings:
        if written.values and any(written.name in setting.derived_from for setting in settings):
            _assert_derived_stay(adapter, settings, {written.name: written.values[0]})


def _assert_derived_stay(adapter: Adapter, settings: list[Setting], source: dict[str, Any]) -> None:
    """Compare what is derived from a setting that is written with what it is where one more is written beside it."""
    before = _used(adapter, source)
    for other in settings:
        for value in other.values[:1] if other.name not in source else ():
            after = unless_raised(_used, adapter, {**source, other.name: value}) or before
            users = {setting.name for setting in settings if other.name in setting.derived_from}
            moved = {name for name, was in before.items() if after[name] != was} - users - {other.name}
            told = (
                f"with {source} written, {other.name}={value!r} beside it changes settings that are not derived from it"
            )
            with soft():
                assert_equal(sorted(moved), [], told, quantity=f"others than {other.name}, beside another")


@check("settings.value_as_text", needs=NEEDS)
def value_as_text(adapter: Adapter) -> None:
    """A number or a truth value that is written as text is that value, or is refused.

    Silent because a run starts with the text: "False" is true, and a learning rate of "1e-6" (which is what YAML reads where
    the point is missing) goes unnoticed up to where numbers are compared. Look for `bool(text)`, for `type=` that is left
    out of an argument, and for a field without validation.
    """
    for setting in _listed(adapter):
        for value in setting.values:
            if isinstance(value, bool | int | float):
                used = unless_raised(_used, adapter, {setting.name: repr(value)})
                got = used[setting.name] if used else value
                told = f"{setting.name} is written as the text {repr(value)!r} and another value used"
                assert_equal(got, value, told, quantity=f"{setting.name} as text")


def _texts() -> Iterator[Case]:
    for text in ("null", "None", "true", "1e5", "007", "1_000", "a: b", " x ", "'", "#"):
        yield Case(repr(text), text=text)


@check("settings.text_as_it_is", needs=NEEDS, cases=_texts)
def text_as_it_is(adapter: Adapter, text: str) -> None:
    """A text that looks like something else is used as it is written, or is refused.

    Silent because the run merely has another name, path or stop text: None for "None", 100000.0 for "1e5". Look for settings
    that are printed and parsed again, as YAML or by `literal_eval`. Where a command line gives such a text another meaning
    on purpose, the adapter declines it with `NotProvided`.
    """
    for setting in _listed(adapter):
        if setting.values and all(isinstance(value, str) for value in setting.values):
            used = unless_raised(_used, adapter, {setting.name: text})
            got = used[setting.name] if used else text
            told = f"{setting.name} is written as the text {text!r} and another value used"
            assert_equal(got, text, told, quantity=setting.name)


@check("settings.unknown_is_refused", severity="hardening", needs=NEEDS)
def unknown_is_refused(adapter: Adapter) -> None:
    """A name that is no setting is refused.

    Silent because a run starts without it: what a misspelt name, or one of the release before, should have set keeps its
    default. Look for `parse_known_args`, `**kwargs`, `get(name, default)` and `extra="ignore"`.
    """
    names = {setting.name for setting in _listed(adapter)}
    for setting in adapter.list_settings():
        for name in sorted({f"{setting.name}z", f"z.{setting.name}"} - names):
            for value in setting.values[:1]:
                used = unless_raised(adapter.effective, {name: value})
                told = f"{name!r} is no setting, and a configuration with it is accepted"
                assert_true(used is None, told, quantity=f"like {setting.name}")


@check("settings.configurations_are_separate", needs=NEEDS)
def configurations_are_separate(adapter: Adapter) -> None:
    """A configuration shares nothing with those before it: neither their values nor their lists.

    Silent because the first run of a process is right: in the next one, an evaluation or a test, a list has what was
    appended to that of the first, or a default is what was written before. Look for mutable defaults, for a shallow copy of
    the defaults, and for parsers that keep what they parsed.
    """
    defaults = _used(adapter, {})
    for setting in _listed(adapter):
        for value in setting.values:
            written = {setting.name: copy.deepcopy(value)}
            used = adapter.effective(written)
            assert_equal(written, {setting.name: value}, "what is written was changed", quantity="written")
            for each in (used[setting.name], adapter.effective({})[setting.name]):
                if isinstance(each, list):
                    each.append("appended")
            assert_equal(_used(adapter, {}), defaults, f"after {written}, the defaults are others", quantity="defaults")
            again = _used(adapter, {setting.name: value})[setting.name]
            told = f"{setting.name}={value!r} is written for the second time, and another value used"
            assert_equal(again, _plain(value), told, quantity="second time")


@check("settings.used_can_be_written", needs=NEEDS)
def used_can_be_written(adapter: Adapter) -> None:
    """A value that one run used, written in the configuration of another, is used there, or refused.

    Silent because this is how a run is repeated: from the configuration that the first one saved. Look for values that are
    printed and parsed again (None, lists, 1e-06), for units that are converted in one direction, and for defaults
    that are computed from others although they are written.
    """
    for setting in _listed(adapter):
        for value in setting.values:
            used = _used(adapter, {setting.name: value})
            again = unless_raised(_used, adapter, used)
            if again is not None:
                told = f"what a run used with {setting.name}={value!r}, written again, is not used"
                assert_equal(again, used, told, quantity=f"with {setting.name}")
