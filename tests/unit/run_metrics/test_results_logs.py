"""`rlcanary dump-logs`: TensorBoard event files and JSON lines become one JSON file."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlcanary.commands.metrics.check_metrics import check_metrics
from rlcanary.commands.metrics.dump_logs import dump_logs
from rlcanary.errors import UserError
from rlcanary.run_metrics import sources
from rlcanary.run_metrics.logs import metric_sources


def write_events(folder: Path, values: dict[str, dict[int, float]], age_s: int = 0, as_tensors: bool = False) -> Path:
    """A real event file; the older ones were changed earlier."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))

    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    writer = EventFileWriter(str(folder), filename_suffix=f".{len(before)}")
    for tag, steps in values.items():
        for step, value in steps.items():
            if as_tensors:  # as TensorFlow 2 writes them: the plugin is named with the first value only
                metadata = plugin if step == next(iter(steps)) else None
                entry = Summary.Value(tag=tag, tensor=make_tensor_proto(value), metadata=metadata)
            else:
                entry = Summary.Value(tag=tag, simple_value=value)
            writer.add_event(Event(step=step, summary=Summary(value=[entry])))
    writer.close()
    (path,) = set(folder.iterdir()) - before
    os.utime(path, (1_700_000_000 - age_s, 1_700_000_000 - age_s))
    return path


def write_lines(path: Path, *lines: object, age_s: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    os.utime(path, (1_700_000_000 - age_s, 1_700_000_000 - age_s))
    return path


def dump(folder: Path, *options: str) -> Result:
    arguments = [str(folder), str(folder.parent / "out.json"), *options]
    return CliRunner().invoke(dump_logs, arguments, standalone_mode=False)


def dumped(folder: Path) -> Any:
    return json.loads((folder.parent / "out.json").read_text())


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("as_tensors", [False, True], ids=["simple values", "tensors"])
def test_event_files_of_a_resumed_run_are_merged_in_order(logs: Path, as_tensors: bool) -> None:
    write_events(logs / "resumed", {"train/loss": {10: 0.25, 11: 0.125}}, as_tensors=as_tensors)
    write_events(logs, {"train/loss": {9: 0.5, 2: 4.0}, "train/reward": {9: 1.0}}, age_s=60, as_tensors=as_tensors)
    assert dump(logs).return_value == 0
    assert dumped(logs) == {"train/loss": {"2": 4.0, "9": 0.5, "10": 0.25, "11": 0.125}, "train/reward": {"9": 1.0}}
    assert list(dumped(logs)["train/loss"]) == ["2", "9", "10", "11"]


def test_checks_hold_a_dumped_run_against_limits(logs: Path) -> None:
    write_events(logs, {"train/loss": {9: 1400.0}})
    dump(logs)
    arguments = [str(logs.parent / "out.json"), 'data["train/loss"]["9"] < 1500']
    assert CliRunner().invoke(check_metrics, arguments, standalone_mode=False).return_value == 0


def test_json_lines_are_flattened(logs: Path) -> None:
    write_lines(
        logs / "run.jsonl",
        {"step": 0, "loss": 2, "train": {"kl": 0.5, "note": "x"}, "done": False},
        {"step": 1, "loss": None},
    )
    assert dump(logs).return_value == 0
    assert dumped(logs) == {"loss": {"0": 2.0, "1": None}, "train/kl": {"0": 0.5}}


def test_line_of_json_that_is_nested_too_deep_is_told_and_left_out(logs: Path) -> None:
    write_lines(logs / "run.jsonl", {"step": 0, "loss": 2})
    with (logs / "run.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    answer = dump(logs)
    assert answer.return_value == 0
    assert "line 2 is not JSON" in answer.output
    assert dumped(logs) == {"loss": {"0": 2.0}}


def test_nan_is_null_and_fails_a_check(logs: Path) -> None:
    write_events(logs, {"loss": {1: math.nan, 2: 1.0}})
    dump(logs)
    assert dumped(logs) == {"loss": {"1": None, "2": 1.0}}
    arguments = [str(logs.parent / "out.json"), 'max(data["loss"]) < 5']
    assert CliRunner().invoke(check_metrics, arguments, standalone_mode=False).return_value == 1


def test_conflict_is_shown_and_the_later_file_counts(logs: Path) -> None:
    write_events(logs, {"loss": {1: 0.5, 2: 0.1, 3: 3.0}}, age_s=60)
    write_lines(logs / "run.jsonl", {"step": 1, "loss": 0.75}, {"step": 2, "loss": 0.1}, {"step": 4, "loss": 4.0})
    answer = dump(logs)
    assert answer.return_value == 0
    assert dumped(logs)["loss"]["1"] == 0.75
    assert "Two values at one step" in answer.output
    (row,) = [line for line in answer.output.splitlines() if "0.75" in line]
    assert "run.jsonl" in row


def test_conflicts_can_be_errors(logs: Path) -> None:
    write_lines(logs / "run.jsonl", {"step": 1, "loss": 0.5}, {"step": 1, "loss": 0.75})
    assert dump(logs, "--error-on-conflicts").return_value == 1
    assert not (logs.parent / "out.json").exists()


def test_only_tags_with_a_prefix_are_kept(logs: Path) -> None:
    write_lines(logs / "run.jsonl", {"step": 1, "train/loss": 0.5, "gpu/mem": 3.0})
    dump(logs, "--require-tag-prefix", "train/")
    assert dumped(logs) == {"train/loss": {"1": 0.5}}


def test_log_of_a_killed_run_is_read_as_far_as_it_goes(logs: Path) -> None:
    events = write_events(logs, {"loss": {1: 0.5, 2: 0.25}})
    events.write_bytes(events.read_bytes()[:-7])
    write_lines(logs / "run.jsonl", {"step": 1, "kl": 0.5}, '{"step": 2, "k')
    write_lines(logs / "other.jsonl", {"name": "no run log"}, {"name": "either"})
    answer = dump(logs)
    assert answer.return_value == 0
    assert dumped(logs) == {"kl": {"1": 0.5}, "loss": {"1": 0.5}}
    warnings = [line for line in answer.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 3
    assert any(f"{events}: damaged or cut off" in line for line in warnings)
    assert any("run.jsonl: line 2 is not JSON" in line for line in warnings)
    assert any("other.jsonl: line 1 has no whole number under step" in line for line in warnings)


@pytest.mark.parametrize("content", [None, {"step": 1, "note": "x"}], ids=["no file", "no scalar"])
def test_folder_without_a_scalar_is_a_mistake(logs: Path, content: object) -> None:
    if content is not None:
        write_lines(logs / "run.jsonl", content)
    assert isinstance(dump(logs).exception, UserError)
    assert not (logs.parent / "out.json").exists()


def test_event_files_without_tensorboard_name_the_package(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(logs, {"loss": {1: 0.5}})
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    error = dump(logs).exception
    assert isinstance(error, UserError)
    assert "pip install tensorboard" in str(error)


def test_source_of_metrics_is_found_from_its_module() -> None:
    folder = Path(sources.__file__).parent
    assert len(metric_sources()) == len(list(folder.glob("[!_]*.py"))) == 3
