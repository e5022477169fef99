"""What an earlier test did to fill a cache, also where it called the same functions before, or handed them on."""

import textwrap
from pathlib import Path

import pytest
from selection_session import edited, run_testmon, selected, write_project

MODULE = """
    import functools
    import os
    import threading
    from pathlib import Path

    DATA = Path(__file__).parent / "data.json"
    kept = {}

    def called_before(): return 1
    def below(): return called_before()
    def called_often(): return 1
    def lazily(name): return name
    def numbers():
        yield one()
    def one(): return 1
    def in_a_thread(): kept["thread"] = 1
    def by_name(): return 1
    def through_a_variable(): return 1
    def never_in_a_fill(): return 1
    def typed_value(): return 1
    def given_value(): return 1
    def read(): return DATA.read_text()
    def is_there(): return os.path.exists(Path(__file__).parent / "flag")

    def first():
        if "first" not in kept:
            kept["first"] = below()
        return kept["first"]

    def often():
        if "often" not in kept:
            kept["often"] = called_often()
        return kept["often"]

    def mapped():
        if "mapped" not in kept:
            kept["mapped"] = map(lazily, ["a", "b"])
        return kept["mapped"]

    def generated():
        if "generated" not in kept:
            kept["generated"] = numbers()
        return kept["generated"]

    def threaded():
        if "threaded" not in kept:
            kept["threaded"] = thread = threading.Thread(target=in_a_thread)
            thread.start()
            thread.join()
        return kept["threaded"]

    def named():
        if "named" not in kept:
            kept["named"] = functools.partial(Names.by_name)
        return kept["named"]

    class Names:
        @staticmethod
        def by_name(): return by_name()

    def aliased():
        loader = through_a_variable
        if "aliased" not in kept:
            kept["aliased"] = map(lambda _: loader(), [1])
        return kept["aliased"]

    def typed():
        found: int | None = kept.get("typed")
        if found is None:
            kept["typed"] = typed_value()
        return kept["typed"]

    def given(cache=None):
        if cache is None:
            cache = {}
        if "given" not in cache:
            cache["given"] = given_value()
        return cache["given"]

    def text():
        if "text" not in kept:
            kept["text"] = read()
        return kept["text"]

    def flag():
        if "flag" not in kept:
            kept["flag"] = is_there()
        return kept["flag"]

    def token(item):
        if item["type"] == "text":
            item["type"] = called_often()
        return item
    """
TESTS = """
    import work

    def test_first_1():
        assert work.called_before() and work.below() and work.first()
    def test_first_2():
        assert work.first()
    def test_often_1():
        assert all(work.called_often() for _ in range(200)) and work.often()
    def test_often_2():
        assert work.often()
    def test_mapped_1():
        assert next(work.mapped()) == "a"
    def test_mapped_2():
        assert next(work.mapped()) == "b"
    def test_generated_1():
        assert list(work.generated()) == [1]
    def test_generated_2():
        assert list(work.generated()) == []
    def test_threaded_1():
        assert work.threaded()
    def test_threaded_2():
        assert work.threaded()
    def test_aliased_1():
        assert list(work.aliased()) == [1]
    def test_aliased_2():
        assert list(work.aliased()) == []
    def test_named_1():
        assert work.named()()
    def test_named_2():
        assert work.named()
    def test_typed_1():
        assert work.typed()
    def test_typed_2():
        assert work.typed()
    def test_given_1():
        assert work.given(work.kept)
    def test_given_2():
        assert work.given(work.kept)
    def test_text_1():
        assert work.DATA.read_text() and work.read() and work.text()
    def test_text_2():
        assert work.text()
    def test_flag_1():
        assert not work.os.path.exists(work.DATA.parent / "flag") and not work.is_there() and not work.flag()
    def test_flag_2():
        assert not work.flag()
    def test_other():
        assert work.never_in_a_fill() and work.token({"type": "x"})
    """


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches") / "project"
    texts = {"work.py": MODULE, "test_work.py": TESTS, "data.json": "{}"}
    write_project(folder, {name: textwrap.dedent(text).lstrip() for name, text in texts.items()})
    run = run_testmon(folder, "-q", "-p", "no:rlcanary-cleanup")
    assert run.returncode == 0, run.stdout
    return folder


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("called_before(): return 1", "called_before(): return 2", "first"),
        ("lazily(name): return name", "lazily(name): return name or 0", "mapped"),
        ("one(): return 1", "one(): return 1 + 0", "generated"),
        ("in_a_thread(): kept", "in_a_thread(): pass; kept", "threaded"),
        ("    def by_name(): return by_name()", "    def by_name(): return 0 or by_name()", "named"),
        ("through_a_variable(): return 1", "through_a_variable(): return 1 + 0", "aliased"),
        ("typed_value(): return 1", "typed_value(): return 2", "typed"),
        ("given_value(): return 1", "given_value(): return 2", "given"),
        ("return DATA.read_text()", "return DATA.read_text() + ''", "text"),
        ("is_there(): return os", "is_there(): return 0 or os", "flag"),
    ],
)
def test_both_tests_depend_on_what_the_first_did_to_fill_it(project: Path, old: str, new: str, kinds: str) -> None:
    with edited(project, "work.py", old, new):
        assert selected(project) == {f"test_{kind}_{number}" for kind in kinds.split() for number in (1, 2)}


def test_a_function_that_is_called_often_before_the_cache_is_filled_counts(project: Path) -> None:
    with edited(project, "work.py", "called_often(): return 1", "called_often(): return 2"):
        found = selected(project)
    assert {"test_often_1", "test_often_2"} <= found <= {"test_often_1", "test_often_2", "test_other"}


def test_a_file_that_was_read_before_the_cache_is_filled_counts(project: Path) -> None:
    with edited(project, "data.json", "{}", "[]"):
        assert selected(project) == {"test_text_1", "test_text_2"}


def test_a_file_that_was_looked_for_before_the_cache_is_filled_counts(project: Path) -> None:
    (project / "flag").write_text("")
    try:
        assert selected(project) == {"test_flag_1", "test_flag_2"}
    finally:
        (project / "flag").unlink()
