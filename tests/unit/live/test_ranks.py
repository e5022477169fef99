"""An update that several data-parallel ranks share is judged as one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcanary.contract.presets import GRPO
from rlcanary.live import Audit
from rlcanary.live.ranks import joined
from rlcanary.live.record import Record

SCRIPT = Path(__file__).parents[2] / "support/live_runs/live_ranks.py"


RUNS = [
    *("ddp/none", "ddp/means of ranks", "ddp/audit", "ddp/audit before the group", "ddp/trainer on rank 1"),
    *("fsdp/none", "fsdp/means of ranks", "fsdp/frozen part", "fsdp/old logprobs first", "ddp/rollout"),
    *("ddp/separate", "ddp/not watched"),
]


CLEAN = {"found": [], "audited": 3, "told": []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Take the updates of all runs on two ranks -> what each rank reports, and the folder of the bundles."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, SCRIPT, folder, *RUNS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], folder


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_correct_update_over_ranks_has_no_finding(runs: Any, sharding: str) -> None:
    told, _ = runs
    assert [each[f"{sharding}/none"] for each in told] == [CLEAN] * 2


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_mean_of_the_means_of_ranks_is_found_on_each_and_written_once(runs: Any, sharding: str) -> None:
    told, folder = runs
    first, second = (each[f"{sharding}/means of ranks"] for each in told)
    assert first == second
    assert "the mean of the losses of 2 micro-batches" in first["found"][0]
    assert [path.name for path in (folder / sharding / "means of ranks").iterdir()] == ["update-0"]


def test_a_frozen_shard_that_moves_on_one_rank_is_found_on_each(runs: Any) -> None:
    told, _ = runs
    for each in told:
        (found,) = each["fsdp/frozen part"]["found"]
        assert "moved frozen" in found


def test_a_root_that_is_whole_before_an_update_and_sharded_behind_it_has_not_moved(runs: Any) -> None:
    told, _ = runs
    assert [each["fsdp/old logprobs first"] for each in told] == [CLEAN] * 2


def test_each_rank_tells_what_is_wrong_with_its_own_rollout(runs: Any) -> None:
    told, folder = runs
    first, second = (each["ddp/rollout"]["told"] for each in told)
    assert first == []
    assert [line.startswith("rlcanary: rank 1: advantages: ") for line in second] == [True, False]
    assert "rank-1-rollout-0" in second[1]
    assert [path.name for path in (folder / "ddp/rollout").iterdir()] == ["rank-1-rollout-0"]


def test_ranks_that_take_updates_of_their_own_write_bundles_of_their_own(runs: Any) -> None:
    told, folder = runs
    assert [(len(each["ddp/separate"]["found"]), each["ddp/separate"]["audited"]) for each in told] == [(1, 3)] * 2
    assert sorted(path.name for path in (folder / "ddp/separate").iterdir()) == ["rank-1-update-0", "update-0"]


def test_an_audit_may_be_made_before_the_processes_know_each_other(runs: Any) -> None:
    told, _ = runs
    assert [each["ddp/audit before the group"] for each in told] == [CLEAN] * 2


def test_a_group_without_the_first_rank_tells_and_writes_what_it_finds(runs: Any) -> None:
    told, folder = runs
    (found,) = told[1]["ddp/trainer on rank 1"]["found"]
    assert "moved frozen" in found
    assert [path.name for path in (folder / "ddp/trainer on rank 1").iterdir()] == ["update-0"]


def test_a_rank_whose_audit_fails_leaves_out_that_update_alone(runs: Any) -> None:
    told, _ = runs
    assert [(each["ddp/audit"]["found"], each["ddp/audit"]["audited"]) for each in told] == [([], 2)] * 2


def test_an_update_of_which_no_rank_watched_anything_is_not_judged_and_said_to_be_so(runs: Any) -> None:
    told, _ = runs
    for each in told:
        assert (each["ddp/not watched"]["found"], each["ddp/not watched"]["audited"]) == ([], 0)
        (line,) = each["ddp/not watched"]["told"]
        assert "no logprobs with a gradient were given to `watch`" in line


def test_rows_of_ranks_are_padded_to_one_width_and_gradients_averaged() -> None:
    records = [
        Record(0, GRPO, torch.ones(2, width), torch.ones(2, width), torch.ones(2, width).bool(), [torch.arange(2)])
        for width in (3, 5)
    ]
    whole = joined(records, "mean")
    assert whole.mask.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5] * 2
    assert whole.gradient.sum() == 8
    assert [rows.tolist() for rows in whole.pieces] == [[0, 1], [2, 3]]
    assert joined(records, "sum").gradient.sum() == 16


def test_several_processes_have_to_say_how_they_share_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcanary.live.ranks.count", lambda: 2)
    with pytest.raises(ValueError, match="the run has 2 processes: say with ranks="):
        Audit(GRPO)
