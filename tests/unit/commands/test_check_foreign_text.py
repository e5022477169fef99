"""Text of the code under test, in names, messages and values, breaks no output of `rlcanary check`."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import rlcanary

MESSAGE = r"[/red] `tick`\n```\n# a heading \ud800 \x1b[31m \x00 \x85 <script> ]]> | \udcff\ttab"
ADAPTER = f"""
from rlcanary.adapters.reference import ReferenceAdapter

class Evil(ReferenceAdapter):
    name = "[/red] `mine` <script>"

    def completion_mask(self, ids, eos_ids, pad_id):
        raise ValueError("{MESSAGE}")

    def combine_rewards(self, parts):
        from rlcanary import NotProvided
        raise NotProvided("{MESSAGE}")

    def render(self, *arguments):
        rendered = super().render(*arguments)
        rendered.ids = ["{MESSAGE}"]
        return rendered
"""
FILES = ("--json=out.json", "--junit=out.xml", "--sarif=out.sarif", "--markdown=out.md", "--html=out.html", "--github")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "my #1 canary.py").write_text(ADAPTER)
    only = "--only=mask.pad_id_zero,mask.pad_equals_eos,reward.parts_add_up,rendering.is_the_template"
    done = rlcanary("check", "my #1 canary.py", only, *FILES, cwd=folder)
    assert done.returncode == 1, done.stderr
    files = {path.suffix: path.read_text(encoding="utf-8") for path in folder.glob("out.*")}
    return files | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.parametrize("name", [".json", ".xml", ".sarif", ".md", ".html", "stdout"])
def test_no_output_has_a_control_character(outputs: dict[str, str], name: str) -> None:
    texts = [outputs[name]]
    if name in (".json", ".sarif"):
        texts = [json.dumps(json.loads(outputs[name]), ensure_ascii=False)]
    assert not re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", texts[0])
    assert r"\ud800 \x1b[31m \x00 \x85" in texts[0].replace(r"\\", "\\")


def test_junit_is_xml(outputs: dict[str, str]) -> None:
    (first, *_) = ElementTree.fromstring(outputs[".xml"]).iter("error")
    assert "# a heading" in (first.text or "")


def test_markdown_keeps_each_message_in_its_block(outputs: dict[str, str]) -> None:
    text = outputs[".md"]
    assert text.startswith("## ❌ Conformance of \\[/red\\] \\`mine\\` \\<script\\>\n")
    outside = re.sub(r"^(`{3,})(\w+)\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "a heading" not in outside
    assert "<script" not in outside.replace("\\<script", "")


def test_sarif_has_the_path_as_a_uri(outputs: dict[str, str]) -> None:
    (run,) = json.loads(outputs[".sarif"])["runs"]
    uris = {each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for each in run["results"]}
    assert uris == {"my%20%231%20canary.py"}


@pytest.mark.parametrize("name", ['"two\\nlines"', '"\\ud800"', '""', "None"])
def test_name_that_fits_into_no_report_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(ADAPTER.replace('"[/red] `mine` <script>"', name))
    done = rlcanary("check", "mine.py", "--only=mask.pad_id_zero", cwd=tmp_path)
    assert done.returncode == 2
    assert "one line of text without control characters" in done.stderr
    assert len(done.stderr.splitlines()) == 1
