import json
import resource
from pathlib import Path

import pytest

from rlcanary.selection.dependencies import Run
from rlcanary.selection.injected.rlcanary_recorder import writing
from rlcanary.selection.injected.rlcanary_recorder.core import Recorder
from rlcanary.selection.injected.rlcanary_recorder.writing import HEADER
from rlcanary.selection.journal import Journals
from rlcanary.selection.recording import tests_with_late_records as late_tests
from rlcanary.selection.source_map import SourceMap
from rlcanary.system.journal import TORN, header_line

MODULE = "import imported\n\n\ndef first():\n    return 1\n\n\ndef second():\n    return 2\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "module.py").write_text(MODULE)
    (folder / "imported.py").write_text("X = 1\n")
    (folder / "package/inner.py").write_text("def f():\n    return 1\n")
    (folder / "data.json").write_text("{}")
    return folder


def run_of(project: Path, *lines: str) -> Run:
    run = Run(SourceMap(project))
    run.add(("p:1", line.split()) for line in lines)
    return run


def lines_of(run: Run, *contexts: str) -> dict[str, set[int]]:
    return dict(run.dependencies(contexts).lines)


def test_code_belongs_to_the_context_that_ran_it_together_with_the_imports_of_its_file(project: Path) -> None:
    run = run_of(project, "c t:1 module.py 4 first", "c t:2 module.py 8 second")
    assert lines_of(run, "t:1") == {"module.py": {1, 5}, "imported.py": {1}}
    assert lines_of(run, "t:2") == {"module.py": {1, 9}, "imported.py": {1}}


def test_a_test_depends_on_the_contexts_that_it_uses_directly_or_not(project: Path) -> None:
    run = run_of(project, "u t:1 actor:a", "u actor:a p:7", "c p:7 module.py 8 second")
    assert lines_of(run, "t:1")["module.py"] == {1, 9}
    assert lines_of(run, "t:2") == {}


def test_contexts_may_use_one_another(project: Path) -> None:
    run = run_of(project, "u p:1 p:2", "u p:2 p:1", "c p:1 module.py 4 first", "u t:1 p:2")
    assert lines_of(run, "t:1")["module.py"] == {1, 5}


def test_a_call_without_a_record_counts_all_that_is_imported_there(project: Path) -> None:
    run = run_of(project, "s t:1 task:module.first module.py")
    found = run.dependencies(["t:1"])
    assert set(found.lines) == {"module.py", "imported.py"}
    assert found.lines["module.py"] == {1, 5, 9}
    assert ("imported.py", "X") in found.through
    assert found.unrecorded == {"task:module.first module.py"}
    run.add([("p:2", ["r", "t:1", "task:module.first"])])
    assert lines_of(run, "t:1") == {}


def test_what_cannot_be_known_depends_on_everything(project: Path) -> None:
    assert set(lines_of(run_of(project, "a t:1"), "t:1")) == {"module.py", "imported.py", "package/inner.py"}


def test_work_that_nobody_is_known_to_have_asked_for_belongs_to_every_test(project: Path) -> None:
    run = run_of(project, "c unknown module.py 4 first")
    assert lines_of(run, "t:1")["module.py"] == {1, 5}


def test_a_data_file_is_a_dependency_unless_the_run_wrote_it(project: Path) -> None:
    run = run_of(project, "d t:1 data.json", "d t:1 absent.json")
    assert lines_of(run, "t:1") == {"data.json": {1}}
    run.add([("p:9", ["w", "data.json"])])
    assert lines_of(run, "t:1") == {}


def test_a_file_that_ray_unpacked_elsewhere_is_found_in_the_project(project: Path) -> None:
    run = run_of(project, "c t:1 /_ray_pkg_0a1b/module.py 4 first", "c t:2 /_ray_pkg_0a1b/inner.py 1 f")
    assert lines_of(run, "t:1")["module.py"] == {1, 5}
    assert lines_of(run, "t:2") == {"package/inner.py": {1, 2}}


def test_a_journal_is_read_on_from_where_it_was_read_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "p-1-ab.journal"
    path.write_bytes(HEADER + b'{"fields": ["u", "t:1", "p:2"]}\n{"fields": ["u", "t:1"')
    journals = Journals(tmp_path)
    assert list(journals.new_lines()) == [("p:1-ab", ["u", "t:1", "p:2"])]
    with path.open("ab") as stream:
        stream.write(b', "p:3"]}\n')
    assert list(journals.new_lines()) == [("p:1-ab", ["u", "t:1", "p:3"])]
    assert list(journals.new_lines()) == []


@pytest.mark.parametrize("text", ["a\tb", "a\nb", "a\\nb", "\\", "ä\x85\u2028", "\udcff", "'\""])
def test_a_journal_gives_back_what_the_recorder_wrote(tmp_path: Path, text: str) -> None:
    recorder = Recorder(str(tmp_path), "/nowhere")
    recorder.write("l", "t:1", text)
    assert [fields for _, fields in Journals(tmp_path).new_lines()] == [["l", "t:1", text]]


def test_the_recorder_writes_a_journal_of_the_house() -> None:
    assert HEADER.decode() == header_line(writing.KIND, writing.VERSION) + "\n"
    assert writing.TORN == TORN


@pytest.mark.parametrize("more_bytes", [0, 7])
def test_records_lost_on_a_full_disk_are_named_and_every_test_depends_on_everything(
    tmp_path: Path, project: Path, more_bytes: int
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = Recorder(str(folder), str(project))
    recorder.write("c", "t:1", "module.py", "4", "first")
    (path,) = folder.glob("*.journal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, hard))
    try:
        recorder.write("c", "t:1", "imported.py", "1", "<module>")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    recorder.write("l", "t:1", "test", "test_a")
    run = Run(SourceMap(project))
    run.add(Journals(folder).new_lines())
    assert run.tests == {"test_a": ["t:1"]}
    assert set(run.dependencies_of_test("test_a").lines) == {"module.py", "imported.py", "package/inner.py"}
    assert any("could not be written" in problem for problem in run.problems)
    assert any("line 3 is damaged" in problem for problem in run.problems) is bool(more_bytes)


@pytest.mark.parametrize("line", [b"{}", b"[1]", b'{"fields": []}', b'{"fields": [1]}', b"u\tt:1\tp:2", b"\xff"])
def test_damaged_line_is_named_and_every_test_depends_on_everything(tmp_path: Path, project: Path, line: bytes) -> None:
    path = tmp_path / "p-1-ab.journal"
    path.write_bytes(HEADER + line + b'\n{"fields": ["c", "t:1", "module.py", "4", "first"]}\n')
    run = Run(SourceMap(project))
    run.add(Journals(tmp_path).new_lines())
    assert set(lines_of(run, "t:1")) == {"module.py", "imported.py", "package/inner.py"}
    (problem,) = run.problems
    assert problem.startswith(f"{path} line 2 is damaged")


def test_journal_of_another_version_is_named_once(tmp_path: Path, project: Path) -> None:
    path = tmp_path / "p-1-ab.journal"
    path.write_text("u\tt:1\tp:2\n")
    run, journals = Run(SourceMap(project)), Journals(tmp_path)
    for _ in range(2):
        run.add(journals.new_lines())
    (problem,) = run.problems
    assert problem.startswith(f"{path}: not a journal of selection")


def test_tests_of_a_killed_run_that_saved_too_little_are_found(tmp_path: Path, project: Path) -> None:
    lines = [
        ["l", "t:1", "test", "test_a"],
        ["l", "t:2", "test", "test_b"],
        ["c", "t:1", "module.py", "4", "first"],
        ["c", "t:2", "module.py", "8", "second"],
    ]
    text = "".join(json.dumps({"fields": fields}) + "\n" for fields in lines)
    (tmp_path / "p-1-ab.journal").write_bytes(HEADER + text.encode())
    module = {("module.py", "<module>"), ("imported.py", "<module>")}
    saved = {"test_a": module | {("module.py", "first")}, "test_b": module}
    assert late_tests(tmp_path, SourceMap(project), saved) == ["test_b"]
