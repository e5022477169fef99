"""The pages of findings: what they show, and that they need nothing but themselves."""

import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from rlcanary.html.check_page import check_page
from rlcanary.html.gallery_page import Column, gallery_page, since
from rlcanary.html.museum_page import Exhibit, museum_pages

HOSTILE = "</title><script>alert('x')</script>\x1b[31m\x07 &amp; \u202eevil"
VOID = {"meta", "line", "path"}
# Their end tags may be left out: the next one of these ends them.
OPEN = {"li", "td", "th", "tr"}


class Outline(HTMLParser):
    """Collects what a page is made of, and fails on a tag that ends another one."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._stack: list[str] = []
        self.feed(text)
        self.close()
        assert self._stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        self.links += [attributes["href"] or ""] if "href" in attributes else []
        self._stack += [tag] if tag not in VOID | OPEN else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID | OPEN:
            assert self._stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str, kind: str) -> list[dict[str, str | None]]:
        return [each for name, each in self.tags if name == tag and kind in (each.get("class") or "").split()]


def grid() -> dict[str, Any]:
    """Make a picture: of the second row's two tokens, the second is not trained and gets a gradient."""
    rows = [
        ([0.5, -1.0], [0.5, -1.0], [False, False], [True, True]),
        ([0.25, 0.0], [0.25, 2.0], [False, True], [True, False]),
    ]
    return {
        "shape": [2, 2],
        "columns": [0, 1],
        "rows": [
            {"label": f"row {row}", "strips": {"expected": wanted, "got": got}, "off": off, "trained": trained}
            for row, (wanted, got, off, trained) in enumerate(rows)
        ],
    }


def check(name: str, status: str, picture: Any = None, message: str = "it differs") -> dict[str, Any]:
    finding = {"fingerprint": "value off by 1", "message": message, "snippet": "run()", "picture": picture or {}}
    is_red = status in ("fail", "error")
    return {
        "id": name,
        "area": name.partition(".")[0],
        "status": status,
        "severity": "update" if is_red else None,
        "message": message if is_red else "",
        "snippet": "run()  # <b>" if is_red else "",
        "findings": [finding] if is_red else [],
    }


def report(*checks: dict[str, Any], adapter: str = "mylib", version: str = "1.0") -> dict[str, Any]:
    return {
        "adapter": adapter,
        "exit_code": 1,
        "versions": {adapter: version, "rlcanary": "0.1.0", "torch": "2.13.0"},
        "checks": list(checks),
        "causes": [{"cause": "the padding is trained", "findings": 1, "checks": ["loss.b"]}],
        "folds": [],
        "explanations": {"loss.b": "A property.\n\nSilent because."},
        "expected": [],
        "stale": [],
        "causes_cut_after": None,
        "coverage": {"ran": 2, "checks": 3, "not_checked": ["sync"], "provide": ["sync_weights"], "would_run": 1},
    }


RED = report(check("loss.a", "pass"), check("loss.b", "fail", {"compared": grid()}), check("sync.c", "not-provided"))
EVIL = report(check("loss.b", "fail", message=HOSTILE), adapter=HOSTILE, version=HOSTILE)


def pages() -> dict[str, str]:
    exhibit = Exhibit(
        "lib.bug", "loss", "lib 1, #2", HOSTILE, EVIL, grid(), {"kl_coef": 0.1}, ([0.1, 0.9], [0.1, 0.2], 4)
    )
    return {
        "check": check_page(RED),
        "evil check": check_page(EVIL),
        "gallery": gallery_page([Column("mylib 1.0", RED), Column(HOSTILE, EVIL)]),
        **museum_pages([exhibit]),
    }


@pytest.mark.parametrize("name", pages())
def test_page_is_well_formed_and_needs_nothing_but_itself(name: str) -> None:
    text = pages()[name]
    outline = Outline(text)
    assert len(outline.ids) == len(set(outline.ids))
    assert all(link.removeprefix("#") in outline.ids for link in outline.links if link.startswith("#"))
    assert {link for link in outline.links if not link.startswith("#")} <= {"index.html", "lib.bug.html"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in outline.tags}
    assert not re.findall(r"https?://|\bsrc=|@import|url\(", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", pages())
def test_text_of_others_is_shown_and_never_a_tag_or_a_control_character(name: str) -> None:
    text = pages()[name]
    assert not re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    if name not in ("check", "index.html"):
        assert "alert('x')" in Outline(text).text
        assert r"\x1b[31m\x07 &amp;amp; \u202eevil" in text


def test_cells_show_number_difference_and_training_without_colour() -> None:
    outline = Outline(check_page(RED))
    cells = [each for tag, each in outline.tags if tag == "td"]
    assert len(cells) == 8
    (off,) = [each for each in cells if "off" in (each.get("class") or "").split()]
    assert "m" in (off["class"] or "").split()
    assert off["title"] == "1: got 2, expected 0"
    assert "2≠" in outline.text
    assert "\N{MINUS SIGN}1" in outline.text
    assert len(outline.named("td", "m")) == 2


def test_head_says_versions_coverage_and_what_was_not_reached() -> None:
    text = Outline(check_page(RED)).text
    for told in (
        "mylib 1.0",
        "torch 2.13.0",
        "2 of 3 checks ran",
        "Not reached: sync",
        "Cause: the padding is trained",
    ):
        assert told in text


def test_red_cell_of_the_gallery_links_to_the_findings_of_its_area() -> None:
    text = gallery_page([Column("mylib 1.0", RED)])
    outline = Outline(text)
    (link,) = [link for link in outline.links if link.startswith("#")]
    section = text[text.index(f'id="{link[1:]}"') :]
    assert "loss.b" in section
    assert [len(outline.named("td", kind)) for kind in ("failing", "passing")] == [1, 0]


def test_adapter_errors_and_stale_entries_are_named_where_they_are_counted() -> None:
    erred = {**check("loss.a", "adapter-error"), "message": "TypeError: no <such> argument"}
    every = report(erred, check("sync.c", "not-provided"))
    cells = Outline(gallery_page([Column("mylib 1.0", every), Column("other", RED)]))
    assert "⚠ 1" in cells.text
    stale = report(check("loss.a", "pass")) | {"stale": ["loss.a"]}
    for page in (check_page(every), gallery_page([Column("mylib 1.0", every)])):
        assert "loss.a met an adapter error: TypeError: no <such> argument" in Outline(page).text
    for page in (check_page(stale), gallery_page([Column("mylib 1.0", stale)])):
        assert "loss.a is expected to fail and does not: remove it" in Outline(page).text
    assert Outline(check_page(stale)).named("li", "failing")


def colours(css: str) -> list[dict[str, str]]:
    """Return the colour variables of a style, light and dark."""
    light, _, dark = css.partition("@media screen and (prefers-color-scheme: dark)")
    named = [dict(re.findall(r"--([\w-]+): (#\w{6})", part.partition("\n}")[0])) for part in (light, dark)]
    return [named[0], named[0] | named[1]]


def brightness(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_failures_on_a_list_of_known_ones_are_counted_apart() -> None:
    known = RED | {"expected": ["loss.b"]}
    page = Outline(check_page(known))
    assert "0 failed1 failed as expected1 passed" in page.text
    assert not page.named("li", "failing")
    assert page.named("li", "passing")


def test_a_strip_names_the_quantity_that_is_off() -> None:
    found = [("[2, 2]: value off by 1", [[1.0]]), ("[2, 2]: gradient off by 0.5", [[1.0, 2.0]])]
    findings = [
        {
            "fingerprint": fingerprint,
            "message": "it differs",
            "snippet": "run()",
            "picture": {"compared": {**grid(), "shape": [len(shape), len(shape[0])]}},
        }
        for fingerprint, shape in found
    ]
    page = Outline(check_page(report({**check("loss.b", "fail"), "findings": findings})))
    assert "Expected and got: value" in page.text
    assert "Expected and got: gradient" in page.text


def test_the_museum_counts_one_bug_as_one() -> None:
    assert "1 silent bug of RL" in museum_pages([Exhibit("a.b", "loss", "a 1", "it does", RED)])["index.html"]


@pytest.mark.parametrize("dark", [0, 1])
def test_text_has_contrast_on_every_colour(dark: int) -> None:
    html = resources.files("rlcanary.html")
    shared, own = (colours(html.joinpath(name).read_text())[dark] for name in ("theme.css", "findings.css"))
    of = shared | own
    pairs = [("on-weak", ground) for ground in ("n1", "n2", "p1", "p2", "code")]
    pairs += [("on-strong", ground) for ground in ("n3", "n4", "p3", "p4")]
    pairs += [("text", ground) for ground in ("h1", "h2", "h3", "passing", "card", "page")]
    pairs += [(text, ground) for text in ("muted", "fail", "pass", "line") for ground in ("card", "page")]
    pairs += [("fail", "code")]
    low = []
    for text, ground in pairs:
        darker, lighter = sorted((brightness(of[text]), brightness(of[ground])))
        if (lighter + 0.05) / (darker + 0.05) < 4.5:
            low.append((text, ground, (lighter + 0.05) / (darker + 0.05)))
    assert low == []


def releases(*statuses: str) -> list[Column]:
    return [
        Column(f"lib {index}", report(check("loss.b", status), version=str(index)))
        for index, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        (("fail",), ""),
        (("pass", "fail", "fail"), "Fails since lib 1, passes in lib 0"),
        (("fail", "fail"), "Fails since lib 0 or before"),
        (("not-provided", "fail"), "Fails since lib 1 or before, was not checked in lib 0"),
        (("fail", "pass", "error", "pass"), "Fails since lib 2, passes in lib 1; passes in lib 3"),
    ],
)
def test_gallery_says_since_which_release_a_check_fails(statuses: tuple[str, ...], told: str) -> None:
    assert since("loss.b", releases(*statuses)) == told


def test_releases_stand_in_their_order_whatever_the_order_of_the_reports() -> None:
    older, newer = (Column(f"lib {version}", report(version=version)) for version in ("1.9.0", "1.10.0"))
    text = gallery_page([newer, older])
    assert text.index("lib 1.9.0") < text.index("lib 1.10.0")


def test_exhibit_shows_batch_run_and_what_catches_it() -> None:
    text = Outline(
        museum_pages([Exhibit("lib.bug", "loss", "lib 1", "worse", RED, grid(), curve=([0.1, 0.9], [0.1, 0.2], 4))])[
            "lib.bug.html"
        ]
    ).text
    for told in (
        "What it does to a batch",
        "What it does to a run",
        "0.90 at the end",
        "What catches it",
        "loss.b",
        "lib 1",
    ):
        assert told in text
