"""Each reviewed equivalent is a mutant of the code as it is, and has a reason."""

from pathlib import Path

from rlcanary.mutants.equivalents import Equivalent, equivalents, stale


def test_no_entry_is_stale() -> None:
    assert stale(equivalents()) == []


def test_every_entry_has_a_reason_and_stands_once() -> None:
    entries = equivalents()
    assert len({entry.id for entry in entries}) == len(entries)
    for entry in entries:
        assert len(entry.reason) > 20, entry.id


def test_entry_of_code_that_has_changed_is_stale(tmp_path: Path) -> None:
    listed = tmp_path / "list.toml"
    listed.write_text(
        '[[equivalent]]\nwhere = "mutable:centred"\nreason = "none"\n'
        'diff = """\n- inside_B = group_ids_B == group\n+ inside_B = group_ids_B != group"""\n'
    )
    (entry,) = equivalents(listed)
    assert stale([entry]) == []
    for changed in (Equivalent(entry.where, "- gone\n+ pass", "none"), Equivalent("mutable:gone", entry.diff, "none")):
        assert stale([changed]) == [changed]
