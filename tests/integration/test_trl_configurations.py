"""TRL's loss types and corrections side by side."""

from pathlib import Path

import pytest
from command_line import rlcanary

pytest.importorskip("trl")


def test_configurations_of_trl_share_rows_and_charge_it_with_no_error(tmp_path: Path) -> None:
    done = rlcanary(
        "check", "trl", "--matrix", "--only", "advantage.declared_formula,loss.declared_value", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert "passed in every configuration: 2" in done.stdout
    assert "vllm_token_truncate" in done.stdout
