"""Folders hold few files, and modules are short enough to be read in one go."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted({file.parent for top in ("harness", "plugins") for file in (ROOT / top).rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_holds_few_modules_of_few_lines(folder: Path) -> None:
    modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    assert len(modules) <= 16
    assert [file.name for file in modules if len(file.read_text().splitlines()) > 400] == []
