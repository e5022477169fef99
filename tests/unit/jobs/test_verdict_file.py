from pathlib import Path

import pytest

from rlcanary.jobs.outcomes import Outcome
from rlcanary.jobs.verdict_file import read_verdict_file


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"", None], ids=["not UTF-8", "a list", "empty", "a folder"])
def test_verdict_that_is_not_understood_aborts_the_search(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "verdict"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    reading = read_verdict_file(file)
    assert reading is not None
    assert reading.outcome is Outcome.ABORT
    assert f"the verdict in {file} cannot be read" in reading.reason
