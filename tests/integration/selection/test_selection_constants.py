"""Which tests an edit of a constant selects, in whatever way they get at it."""

import textwrap
from pathlib import Path

import pytest
from selection_session import edited, run_testmon, selected, write_project

VALUES = """
    import re
    import math

    __all__ = ["STARRED"]
    __version__ = "1.0"
    STARRED = 1
    PART = r"[a-z]+"
    WORD = re.compile(PART + r"\\d*", re.IGNORECASE | re.MULTILINE)
    UNREAD = re.compile("unread")
    NAMES = frozenset({"a", "b"})
    LINES = "one two".split()
    SECONDS = 60 * 60
    DEFAULT = 2
    IMPORTED_LATER = 3
    ALIASED = 4
    GLOBAL = 5
    parse_one = 6
    BY_MODULE = 7
    IN_SUBPROCESS = 8
    THIRD = 9
    MADE = [1]
    MADE.append(2)

    def first(text):
        return WORD.match(text)

    def with_default(x=DEFAULT):
        return x

    def own(name):
        return globals()[name]

    class Plain:
        size = re.compile("1")
        computed = 1

        def get(self, name):
            return object.__getattribute__(self, name)

    class Derived(Plain):
        pass

    class Dialect:
        delimiter = ";"
        quoting = 0

    class Other(Dialect):
        pass
    """
OTHER = """
    import importlib
    import values
    from values import ALIASED as other_name
    TABLE = {"later": values.IMPORTED_LATER}

    def aliased():
        return other_name

    def by_module(name):
        module = importlib.import_module("values")
        return getattr(module, name)

    def computed(name):
        return getattr(values, f"parse_{name}")
    """
MORE = """
    from values import *

    def starred():
        return STARRED
    """
TESTS = {
    "test_plain": """
        import csv, subprocess, sys, textwrap
        import values

        def test_word(): assert values.first("a")
        def test_names(): assert "a" in values.NAMES
        def test_lines(): assert values.LINES
        def test_seconds(): assert values.SECONDS
        def test_default(): assert values.with_default()
        def test_own(): assert values.own("GLOB" + "AL")
        def test_size(): assert values.Derived.size
        def test_attribute(): assert values.Plain().get("comp" + "uted")
        def test_handed(): assert next(csv.reader(["a;b"], values.Dialect))
        def test_inherited(): assert next(csv.reader(["a;b"], values.Other))
        def test_version(): assert values.__version__
        def test_made(): assert values.MADE
        def test_nothing(): pass

        def test_process():
            code = textwrap.dedent('''
                # A program, long enough that its words are not taken for names: .......................................
                # .............................................................................................
                import values
                assert values.IN_SUBPROCESS
                ''')
            subprocess.run([sys.executable, "-c", code], check=True)
        """,
    "test_more": """
        import more

        def test_starred(): assert more.starred()
        """,
    "test_other": """
        import other

        def test_aliased(): assert other.aliased()
        def test_by_module(): assert other.by_module("BY_" + "MODULE")
        def test_computed(): assert other.computed("one")
        """,
}
PLAIN = "word names lines seconds default own size attribute handed inherited version made nothing process"
OTHERS = "aliased by_module computed"
EVERY = f"{PLAIN} {OTHERS} starred"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("constants") / "project"
    texts = {"values.py": VALUES, "other.py": OTHER, "more.py": MORE} | {f"{name}.py": TESTS[name] for name in TESTS}
    write_project(folder, {name: textwrap.dedent(text).lstrip() for name, text in texts.items()})
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    run = run_testmon(folder, "-q", "-p", "no:rlcanary-cleanup")
    assert run.returncode == 0, run.stdout
    return folder


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('re.compile("unread")', 're.compile("other")', "own by_module"),
        ('re.compile("unread")', 're.compile("(")', EVERY),  # it cannot be imported any more
        ('re.compile("unread")', 're.compile("[[a]")', EVERY),  # which warns
        ("[a-z]+", "[a-y]+", "word own by_module"),
        ("[a-z]+", "[a-z+", EVERY),
        ("re.IGNORECASE |", "re.DOTALL |", "word own by_module"),
        ("re.IGNORECASE |", "re.DEBUG |", EVERY),
        ('{"a", "b"}', '{"a", "c"}', "names own by_module"),
        ('{"a", "b"}', '{"a", []}', EVERY),
        ('"one two".split', '"one two three".split', "lines own by_module"),
        ("60 * 60", "60 * 61", "seconds own by_module"),
        ("60 * 60", "60 / 0", EVERY),
        ("DEFAULT = 2", "DEFAULT = 3", EVERY),
        ("IMPORTED_LATER = 3", "IMPORTED_LATER = 4", f"{OTHERS} own"),
        ("ALIASED = 4", "ALIASED = 5", "aliased own by_module"),
        ("GLOBAL = 5", "GLOBAL = 6", "own by_module"),
        ("parse_one = 6", "parse_one = 7", "computed own by_module"),
        ("BY_MODULE = 7", "BY_MODULE = 8", "by_module own"),
        ("IN_SUBPROCESS = 8", "IN_SUBPROCESS = 9", "process own by_module"),
        ("THIRD = 9", "THIRD = 10", "own by_module"),
        ("MADE = [1]", "MADE = [3]", EVERY),
        ('size = re.compile("1")', 'size = re.compile("2")', "size attribute own by_module"),
        ("computed = 1", "computed = 2", "attribute computed own by_module"),
        ('delimiter = ";"', 'delimiter = ","', "attribute handed inherited own by_module"),  # which a library reads
        ('__all__ = ["STARRED"]', '__all__ = ["STARRED", "PART"]', "starred own by_module"),
        ('"1.0"', '"1.1"', "version own by_module"),
        ("STARRED = 1", "STARRED = 2", "starred own by_module"),
    ],
)
def test_an_edit_of_a_constant_selects_those_that_may_read_it(project: Path, old: str, new: str, expected: str) -> None:
    with edited(project, "values.py", old, new):
        assert selected(project) == {f"test_{name}" for name in expected.split()}


LIBRARY = """
    import importlib

    def load(module):
        return {name: getattr(module, name) for name in dir(module) if name.isupper()}

    def load_by_name(name):
        return load(importlib.import_module(name))
    """
HANDING = """
    import sys
    import library
    import settings
    from package import other
    import package.other as renamed

    def given():
        return settings

    def test_handed(): assert library.load(settings)
    def test_given(): assert library.load(given())
    def test_fixture(module): assert library.load(module)
    def test_listed(): assert library.load(sys.modules["settings"])
    def test_by_name(): assert library.load_by_name("settings")
    def test_by_computed_name(): assert library.load_by_name("set" + "tings")
    def test_other(): assert library.load(other)
    def test_renamed(): assert library.load(renamed)
    def test_spelled(monkeypatch):
        monkeypatch.setattr(settings, "NAMED", 2)
        assert getattr(settings, "NAMED")
    def test_uses(): assert settings.used()
    """
HANDING_CONFTEST = """
    import library
    import pytest
    import settings

    @pytest.fixture
    def module():
        return settings

    def pytest_configure():
        library.load_by_name("at_start")
    """


def test_a_module_that_other_code_gets_hold_of_may_have_any_constant_read(tmp_path: Path) -> None:
    files = {
        "settings.py": "RATE = 1\nNAMED = 1\n\ndef used():\n    return 1\n",
        "at_start.py": "RATE = 1\n",
        "package/__init__.py": "",
        "package/other.py": "RATE = 1\n",
        "conftest.py": HANDING_CONFTEST,
        "test_it.py": HANDING,
    }
    project = write_project(tmp_path / "project", {name: textwrap.dedent(text) for name, text in files.items()})
    library = write_project(tmp_path / "library", {"library.py": textwrap.dedent(LIBRARY)})
    assert "10 passed" in run_testmon(project, PYTHONPATH=str(library)).stdout
    assert selected(project) == set()
    handed = {"test_handed", "test_given", "test_fixture", "test_listed", "test_by_name", "test_by_computed_name"}
    with edited(project, "settings.py", "RATE = 1", "RATE = 2"):
        assert selected(project) == handed
    with edited(project, "settings.py", "NAMED = 1", "NAMED = 3"):
        assert selected(project) == {*handed, "test_spelled"}
    with edited(project, "package/other.py", "RATE = 1", "RATE = 2"):
        assert selected(project) == {"test_other", "test_renamed"}
    with edited(project, "at_start.py", "RATE = 1", "RATE = 2"):
        assert selected(project) == {*handed, "test_other", "test_renamed", "test_spelled", "test_uses"}
