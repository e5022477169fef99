"""The pages of findings: the commands of docs/pages.md as typed, and their pages in a real browser."""

import json
import re
import shlex
from pathlib import Path

import pytest
from chromium import browse, needs_browser
from command_line import rlcanary
from PIL import Image

PAGE = (Path(__file__).parents[2] / "docs/pages.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
CANARY = """
from rlcanary import Adapter

class WrongMean(Adapter):
    name = "wrong-mean"

    def advantages(self, rewards, group_ids):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        return completion_ids != pad_token_id
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a reader has typed all commands of the page."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "canary.py").write_text(CANARY)
    codes = [rlcanary(*shlex.split(command)[1:], cwd=folder).returncode for command in COMMANDS]
    assert codes == [1, 0, 0]  # the adapter is wrong
    return folder


def test_commands_write_the_pages_that_the_text_names(reader: Path) -> None:
    written = {path.name for path in reader.rglob("*.html")}
    assert written == {"report.html", "gallery.html", "index.html", "verl.advantages-as-mask.html"}
    assert all(path.stat().st_size < 1_000_000 for path in reader.rglob("*.html"))


def test_report_draws_every_check_that_failed(reader: Path) -> None:
    text = (reader / "report.html").read_text()
    failed = [each for each in json.loads((reader / "today.json").read_text())["checks"] if each["status"] == "fail"]
    assert {"advantage.groups_are_separate", "mask.pad_equals_eos"} <= {each["id"] for each in failed}
    articles = dict(re.findall(r'<article id="(.*?)">(.*?)</article>', text, re.DOTALL))
    for each in failed:
        is_drawn = bool(each["findings"][0]["picture"])
        assert ("<table class=strips>" in articles[each["id"]]) == is_drawn
        assert "Program that shows it again" in articles[each["id"]]
    assert re.findall(r'<td class="[np]\d off" title="[^"]*expected', text)


def test_gallery_shows_the_report_and_the_adapter_that_it_checked_alike(reader: Path) -> None:
    text = (reader / "gallery.html").read_text()
    assert "wrong-mean (canary)" in text
    assert "wrong-mean (today)" in text
    table = text.partition("<table class=heat>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr><th scope=row>(\w+)(.*?)(?=<tr>|</tbody>)", table)
    cells = {area: re.findall(r"[✗✓] [\d of]+|none", row) for area, row in rows}
    assert cells["advantage"][0].startswith("✗")
    assert all(len(row) == 2 and row[0] == row[1] for row in cells.values())


def test_exhibit_has_a_push_and_a_curve(reader: Path) -> None:
    text = (reader / "museum/verl.advantages-as-mask.html").read_text()
    assert text.count("<svg class=curve") == 1
    assert "Push on each token" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gallery", "missing.json"], "cannot read missing.json"),
        (["gallery", "canary.json"], "no report"),
        (["gallery", "text.json"], "not JSON"),
        (["gallery", "nothing_like_it"], "no adapter 'nothing_like_it'"),
        (["gallery", "canary.json", "--output", "no/such/folder.html"], "cannot write"),
        (["check", "canary.py", "--html", "no/such/folder.html"], "cannot write"),
        (["bugs", "--curves"], "--html"),
    ],
)
def test_mistake_is_one_line_and_exit_2(arguments: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "canary.json").write_text('{"adapter": "x", "checks": [{}]}')
    (tmp_path / "text.json").write_text("{")
    done = rlcanary(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.html"))


@needs_browser
@pytest.mark.parametrize(("scheme", "dark"), [("0", True), ("1", False)])
def test_page_follows_the_scheme_of_the_system(reader: Path, scheme: str, dark: bool) -> None:
    image = reader / "page.png"
    options = (f"--screenshot={image}", f"--blink-settings=preferredColorScheme={scheme}")
    browse(reader / "report.html", *options, size="390,1500")
    histogram = Image.open(image).convert("L").histogram()
    background = histogram.index(max(histogram))
    assert background < 64 if dark else background > 192
    # Text, and the cells of strips in both colours.
    assert sum(histogram[192:] if dark else histogram[:96]) > 500
