"""Commands read the same settings as pytest does, from the same file."""

from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.system.pytest_settings import pytest_settings

INI = (
    "[pytest]\nrlcanary_results = out/%x.json  # kept\ntestpaths = checks more\n"
    "rlcanary_directions =\n    *.loss = lower\n"
)
FILES = {
    "pytest.toml": '[pytest]\nrlcanary_results = "out/%x.json"\ntestpaths = ["checks", "more"]\n'
    'rlcanary_directions = ["*.loss = lower"]\n',
    ".pytest.toml": '[pytest]\nrlcanary_results = "out/%x.json"\n',
    "pytest.ini": INI,
    ".pytest.ini": INI,
    "pyproject.toml": '[tool.pytest.ini_options]\nrlcanary_results = "out/%x.json"\ntestpaths = "checks"\n'
    'rlcanary_directions = """\n*.loss = lower\n"""\n',
    "native/pyproject.toml": '[tool.pytest]\nrlcanary_results = "out/%x.json"\n',
    "tox.ini": INI,
    "setup.cfg": INI.replace("[pytest]", "[tool:pytest]"),
}


def assert_same_as_pytest(pytester: pytest.Pytester, folder: Path) -> None:
    config = pytester.parseconfig(str(folder))
    settings = pytest_settings(folder)
    assert settings.root == config.rootpath
    assert settings.text("rlcanary_results") == config.getini("rlcanary_results")
    assert settings.words("testpaths") == config.getini("testpaths")
    assert settings.lines("rlcanary_directions") == config.getini("rlcanary_directions")


@pytest.mark.parametrize("name", FILES)
def test_settings_are_those_of_pytest(pytester: pytest.Pytester, name: str) -> None:
    path = pytester.path / "project" / name
    path.parent.mkdir(parents=True)
    path.write_text(FILES[name])
    assert "out/%x.json" in pytest_settings(path.parent).text("rlcanary_results")
    inner = path.parent / "tests" / "unit"
    inner.mkdir(parents=True)
    assert_same_as_pytest(pytester, path.parent)
    assert_same_as_pytest(pytester, inner)


def test_first_file_that_configures_pytest_counts(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("project")
    (folder / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    (folder / "tox.ini").write_text(INI)
    assert_same_as_pytest(pytester, folder)
    (folder / "pytest.ini").touch()
    assert pytest_settings(folder).text("rlcanary_results") == ""
    assert_same_as_pytest(pytester, folder)


def test_settings_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest")
    with pytest.raises(UserError, match=r"cannot read .*pyproject\.toml"):
        pytest_settings(tmp_path)
