"""A report names what the user pointed at."""

from pathlib import Path

import pytest

from rlcanary.adapters.load import load_adapter

SOURCE = """
from rlcanary.adapters.reference import ReferenceAdapter

class Mine(ReferenceAdapter):
    pass

class Named(ReferenceAdapter):
    name = "ours"

made = ReferenceAdapter()
"""


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("Mine", "Mine"),
        ("Named", "ours"),
        ("made", "canary_names.py:made"),
        ("ReferenceAdapter", "canary_names.py:ReferenceAdapter"),
    ],
)
def test_adapter_of_a_user_is_never_reported_as_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, name: str
) -> None:
    (tmp_path / "canary_names.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert load_adapter(f"canary_names.py:{attribute}").name == name


def test_bundled_adapter_keeps_its_name_wherever_it_is_named() -> None:
    assert load_adapter("rlcanary.adapters.reference:ReferenceAdapter").name == "reference"
