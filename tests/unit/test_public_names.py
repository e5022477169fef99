"""The names that users import: from the package itself, and under the paths of the last release."""

import importlib
import subprocess
import sys

import pytest

import rlcanary


@pytest.mark.parametrize("name", rlcanary.__all__)
def test_public_name_is_importable_from_the_package(name: str) -> None:
    (home,) = [module for module, names in rlcanary.HOMES.items() if name in names]
    assert getattr(rlcanary, name) is getattr(importlib.import_module(home), name)


def test_every_record_of_the_contract_is_a_public_name() -> None:
    from rlcanary.contract.records import RECORDS

    assert {record.__name__ for record in RECORDS} <= set(rlcanary.__all__)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, rlcanary; assert 'torch' not in sys.modules; rlcanary.Conventions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Adaptor"):
        rlcanary.Adaptor  # noqa: B018


def test_old_path_is_the_same_module_and_says_the_new_path() -> None:
    code = (
        "import importlib, warnings\n"
        "from rlcanary.system.old_names import OLD_NAMES\n"
        "for old_name, new_name in OLD_NAMES.items():\n"
        "    with warnings.catch_warnings(record=True) as told:\n"
        "        warnings.simplefilter('always')\n"
        "        old = importlib.import_module(old_name)\n"
        "    new = importlib.import_module(new_name)\n"
        "    assert old is new and new.__name__ == new.__spec__.name == new_name\n"
        "    lines = [str(w.message) for w in told if w.category is FutureWarning]\n"
        "    assert len([line for line in lines if old_name in line and new_name in line]) == 1, lines\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
