"""What the ledger of alarms keeps on disk."""

from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.history.ledger import NAME, open_ledger, read_ledger


def test_alarm_outlives_the_process_with_all_that_happened_to_it(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        alarm = ledger.add("test_a.loss", "step", True, 10.0, 20.0)
        ledger.note_event(alarm, "seen", "run1", 30.0)
        ledger.note_event(alarm, "known", "run2", 40.0)
        ledger.watch(["test_a.loss"])
    with open_ledger(tmp_path) as ledger:
        (alarm,) = ledger.open_alarms()
        assert alarm.events == {"seen": ("run1", 30.0), "known": ("run2", 40.0)}
        assert ledger.watched == {"test_a.loss"}
        ledger.note_event(alarm, "acknowledged", "run3", 50.0, note="meant so")
        ledger.note_event(alarm, "over", "run4", 60.0)
    ledger = read_ledger(tmp_path)
    assert ledger.open_alarms() == []
    assert ledger.alarms[0].note == "meant so"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("m", "step", True, 15.0, 25.0), True),
        (("m", "step", True, 20.0, 25.0), False),
        (("m", "step", False, 10.0, 20.0), False),
        (("other", "step", True, 10.0, 20.0), False),
        (("m", "drift", True, 10.0, 20.0), False),
        (("day", "step", True, 10.0, 10.0), True),
    ],
)
def test_change_is_the_same_while_its_places_overlap(
    tmp_path: Path, change: tuple[str, str, bool, float, float], same: bool
) -> None:
    ledger = read_ledger(tmp_path)
    alarms = [ledger.add("m", "step", True, 10.0, 20.0), ledger.add("day", "step", True, 10.0, 10.0)]
    assert (ledger.find(*change) in alarms) == same


def test_step_that_seemed_over_is_the_same_when_it_is_seen_again(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        alarm = ledger.add("m", "step", True, 10.0, 20.0)
        for at_s, event in enumerate(("seen", "known", "over"), 30):
            ledger.note_event(alarm, event, f"run{at_s}", float(at_s))
    with open_ledger(tmp_path) as ledger:
        (alarm,) = ledger.alarms
        assert ledger.find("m", "step", True, 12.0, 22.0) is alarm
        assert ledger.find("m", "step", True, 31.0, 40.0) is None
        ledger.note_event(alarm, "back", "run33", 33.0)
    (alarm,) = read_ledger(tmp_path).open_alarms()
    assert alarm.events["known"] == ("run31", 31.0)


def test_half_a_line_costs_that_line_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.watch(["a"])
    path = tmp_path / NAME
    whole = path.read_text()
    path.write_text(whole + '{"record": "watched", "met')
    with open_ledger(tmp_path) as ledger:
        ledger.watch(["b"])
    assert read_ledger(tmp_path).watched == {"a", "b"}
    path.write_text(whole + '{"record": "guessed"}\n')
    with pytest.raises(UserError, match="line 3"):
        read_ledger(tmp_path)
