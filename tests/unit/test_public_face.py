"""What is promised stays: names, fields, arguments without a default, commands and options (docs/stability.md)."""

from public_face import PROMISED, public_face

import rlcanary


def test_every_promised_line_still_holds() -> None:
    """A line that is gone breaks somebody's adapter or script: if on purpose, say so in CHANGELOG.md and write the file."""
    offered = set(public_face())
    gone = [line for line in PROMISED.read_text().splitlines() if line not in offered]
    assert gone == []


def test_every_public_name_is_promised() -> None:
    """`python tests/support/public_face.py` promises what is new."""
    promised = PROMISED.read_text()
    assert [name for name in rlcanary.__all__ if name not in promised] == []


def test_an_argument_without_a_default_breaks_the_promise(monkeypatch) -> None:
    def advantages(self, rewards, group_ids, lengths): ...

    monkeypatch.setattr(rlcanary.Adapter, "advantages", advantages)
    assert "Adapter.advantages(rewards, group_ids)" in PROMISED.read_text().splitlines()
    assert "Adapter.advantages(rewards, group_ids)" not in public_face()
