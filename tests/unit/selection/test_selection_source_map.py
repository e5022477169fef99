from pathlib import Path

import pytest

from rlcanary.selection.source_map import SourceFile, SourceMap


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "pkg/__init__.py": "",
        "pkg/a.py": "from pkg import b\n",
        "pkg/b.py": "from .sub import c as renamed\nfrom . import sibling\n",
        "pkg/sibling.py": "",
        "pkg/sub/__init__.py": "from .. import top\n",
        "pkg/sub/c.py": "import os, json\n",
        "pkg/top.py": "try:\n    import pkg.optional\nexcept ImportError:\n    pass\n",
        "pkg/optional.py": "",
        "pkg/typed.py": "import typing\nif typing.TYPE_CHECKING:\n    import pkg.a\nelse:\n    import pkg.sibling\n",
        "pkg/late.py": "def f():\n    import pkg.sibling\n",
        "pkg/named.py": "import importlib\nM = importlib.import_module('pkg.sibling')\n",
        "pkg/broken.py": "def (:\n",
        "src/lib/__init__.py": "",
        "src/lib/x.py": "",
        "uses_src.py": "import lib.x\n",
        "unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("start", "reached"),
    [
        (
            "pkg/a.py",
            "pkg/__init__.py pkg/a.py pkg/b.py pkg/sub/__init__.py pkg/sub/c.py pkg/sibling.py pkg/top.py pkg/optional.py",
        ),
        ("pkg/typed.py", "pkg/__init__.py pkg/typed.py pkg/sibling.py"),
        ("pkg/late.py", "pkg/__init__.py pkg/late.py pkg/sibling.py"),
        ("pkg/named.py", "pkg/__init__.py pkg/named.py pkg/sibling.py"),
        ("pkg/broken.py", "pkg/__init__.py pkg/broken.py"),
        ("uses_src.py", "uses_src.py src/lib/__init__.py src/lib/x.py"),
        ("unused.py", "unused.py"),
        ("absent.py", ""),
    ],
)
def test_the_import_map_is_transitive_and_knows_packages(project: Path, start: str, reached: str) -> None:
    sources = SourceMap(project, [str(project / "src"), "/usr/lib/python3"])
    assert sources.closure([start]) == set(reached.split())


def test_only_the_imports_of_the_module_itself_belong_to_its_body(project: Path) -> None:
    sources = SourceMap(project)
    late = sources.file("pkg/late.py")
    assert late is not None
    module, function = late.blocks
    assert sources.imported_by("pkg/late.py", module) == set()
    assert "pkg/sibling.py" in sources.imported_by("pkg/late.py", function)


TEXT = b'''"""Docstring."""
import functools

@functools.cache
@property
def decorated():
    "Docstring."
    def inner():
        return [x for x in (lambda y: y)(range(3))]
    return inner

class Class:
    attribute = 1

    async def method(self): return 1

lambda_ = lambda: 0
'''


def find(code: object, names: list[str]) -> object:
    for constant in code.co_consts:
        if getattr(constant, "co_name", None) == names[0]:
            return find(constant, names[1:]) if names[1:] else constant
    raise AssertionError(names)


@pytest.mark.parametrize(
    ("names", "block", "start"),
    [
        (["decorated"], "decorated", 7),
        (["decorated", "inner"], "decorated.inner", 9),
        (["decorated", "inner", "<lambda>"], "decorated.inner", 9),
        (["Class"], "<module>", 1),
        (["Class", "method"], "Class.method", 15),
        (["<lambda>"], "<module>", 1),
    ],
)
def test_a_code_object_belongs_to_its_function_or_to_the_one_around_it(
    names: list[str], block: str, start: int
) -> None:
    code = find(compile(TEXT, "file.py", "exec"), names)
    found = SourceFile(TEXT).block_at(code.co_firstlineno, code.co_qualname)
    assert (found.name, found.start) == (block, start)


def test_every_file_of_the_project_is_found_but_installed_packages_are_not(project: Path) -> None:
    (project / "venv/lib").mkdir(parents=True)
    (project / "venv/pyvenv.cfg").touch()
    (project / "venv/lib/module.py").touch()
    (project / ".hidden").mkdir()
    (project / ".hidden/module.py").touch()
    found = SourceMap(project).all_files()
    assert {"unused.py", "pkg/sub/c.py"} <= found
    assert not any("venv" in file or "hidden" in file for file in found)
