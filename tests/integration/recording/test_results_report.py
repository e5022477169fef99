"""`rlcanary report`, opened in a real browser."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import browse, needs_browser
from PIL import Image

RUNS = 60
HOSTILE = "test_x::test_[</script><script>document.body.remove()</script>&amp;]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("my project")
    results = project / "tests/unit/unit_results"
    results.mkdir(parents=True)
    for run in range(RUNS):
        metrics = {
            "test_grpo::test_training": {"loss": 0.5 if run < 40 else 0.625, "reward": 0.5 if run < 20 else 0.75},
            "test_policy::test_generation[0.5]": {"entropy": 2.0 if run < 30 else 1.0, "nan": None, "text": "x"},
            HOSTILE: {"x": run % 7},
        }
        document = {
            "git_commit": f"{run + 1:040x}",
            "start_time_utc": f"2025-{run // 28 + 1:02d}-{run % 28 + 1:02d}T12:00:00+00:00",
            "metrics": metrics,
        }
        (results / f"run{run}.json").write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-m", "rlcanary", "report"], cwd=project, capture_output=True, text=True, check=True
    )
    path = project / "tests/unit/unit_results.html"
    assert done.stdout.startswith(str(path))
    assert not list(results.glob("*.html"))
    return path


def cards(document: str) -> dict[str, str]:
    """The visible cards of a page by their metric."""
    found = re.findall(r"<article ([^>]*)>(.*?)</article>", document, re.DOTALL)
    return {re.findall("<h2>(.*?)</h2>", card)[0]: card for attributes, card in found if "hidden" not in attributes}


def test_page_needs_nothing_but_itself(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"' )]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\b(?:src|href)=|@import|url\(", text)


@needs_browser
def test_every_number_has_a_plot_with_its_steps_marked(page: Path) -> None:
    shown = cards(browse(page, "--dump-dom"))
    assert set(shown) == {"loss", "reward", "entropy", "nan", "x"}
    assert all(card.count("<svg") == 1 for card in shown.values())
    marked = {name: re.findall('class="step (.*?)"', card) for name, card in shown.items()}
    assert marked == {"loss": ["worse"], "reward": ["better"], "entropy": ["moved"], "nan": [], "x": []}
    assert "0.5 → 0.625, +25 %" in shown["loss"]
    assert f"{40:040x}"[:10] + "…" + f"{41:040x}"[:10] in shown["loss"]
    assert shown["nan"].count('class="missing"') == RUNS
    assert "test_[&lt;/script&gt;" in shown["x"]


@needs_browser
def test_page_begins_with_what_is_worse_now(page: Path) -> None:
    front = re.findall('<section id="now">(.*?)</section>', browse(page, "--dump-dom"), re.DOTALL)[0]
    (worse,) = re.findall('<div class="entry new">(.*?)</div></div>', front, re.DOTALL)
    assert "test_grpo::test_training.loss" in worse
    assert "0.5 → 0.625" in worse
    assert f"between {40:040x}"[:18] in front


@needs_browser
def test_commits_link_to_the_repository_where_it_has_an_address(page: Path, tmp_path: Path) -> None:
    text = page.read_text().replace('"web":null', '"web":"https://git.team.org/team/code"')
    (tmp_path / "page.html").write_text(text)
    shown = browse(tmp_path / "page.html", "--dump-dom")
    link = f'<a href="https://git.team.org/team/code/compare/{40:040x}...{41:040x}">'
    assert f"between {link}" in shown
    assert f"{link}{40:040x}"[: len(link) + 10] in cards(shown)["loss"]
    assert "<a href" not in cards(browse(page, "--dump-dom"))["loss"]


@needs_browser
def test_search_leaves_what_holds_every_word(page: Path) -> None:
    assert set(cards(browse(page, "--dump-dom", fragment="#q=GRPO+los"))) == {"loss"}


@needs_browser
@pytest.mark.parametrize(
    ("preferred", "fragment", "dark"),
    [("0", "", True), ("1", "", False), ("0", "#theme=light", False), ("1", "#theme=dark", True)],
)
def test_theme_follows_the_system_unless_one_is_chosen(
    page: Path, tmp_path: Path, preferred: str, fragment: str, dark: bool
) -> None:
    image = tmp_path / "page.png"
    options = (f"--screenshot={image}", f"--blink-settings=preferredColorScheme={preferred}")
    browse(page, *options, fragment=fragment, size="900,600")
    pixels = Image.open(image).convert("L")
    histogram = pixels.histogram()
    background = histogram.index(max(histogram))
    assert background < 64 if dark else background > 192
    text = histogram[192:] if dark else histogram[:96]
    assert sum(text) > 500
