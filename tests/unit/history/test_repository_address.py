"""The address of a repository, to whose commits the report links."""

import subprocess
from pathlib import Path

import pytest

from rlcanary.history.repository import web_address


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/team/code.git", "https://github.com/team/code"),
        ("https://name:secret@github.com/team/code", "https://github.com/team/code"),
        ("https://git.team.org:8443/deep/er/code.git/", "https://git.team.org:8443/deep/er/code"),
        ("git@github.com:team/code.git", "https://github.com/team/code"),
        ("ssh://git@git.team.org:2222/team/code.git", "https://git.team.org/team/code"),
        ("../code.git", None),
        ("/srv/git/code.git", None),
        ("file:///srv/git/code.git", None),
        (None, None),
    ],
)
def test_address_is_that_of_origin_without_a_password(tmp_path: Path, remote: str | None, address: str | None) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert web_address(tmp_path) == address


def test_folder_outside_of_a_repository_has_no_address(tmp_path: Path) -> None:
    assert web_address(tmp_path) is None
