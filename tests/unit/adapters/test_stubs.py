import importlib.util
import subprocess
import sys
import typing

import pytest

from rlcanary.adapters.stubs import KERNELS, absent, newer_typed_dicts, stubbed

ABSENT = {"no_such_kernels": (), "no_such_kernels.padding": ("pad_input",)}


def test_a_stub_is_there_for_the_imports_of_the_block_alone():
    with stubbed(ABSENT):
        from no_such_kernels.padding import pad_input
    assert "no_such_kernels" not in sys.modules
    with pytest.raises(NotImplementedError, match=r"no_such_kernels.padding.pad_input is a stub"):
        pad_input(1)


def test_an_annotation_is_the_type_that_it_begins_with():
    with stubbed({"no_such_annotations": ("Float",)}):
        from no_such_annotations import Float
    assert Float[int, "batch"] is int


def test_a_package_that_is_installed_is_not_replaced():
    with stubbed({"torch": ("Tensor",)}):
        import torch
    assert torch.tensor([1]).item() == 1


def test_a_failed_import_leaves_no_stub_behind():
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    with pytest.raises(ImportError), stubbed(KERNELS):
        from flash_attn.bert_padding import no_such_function  # noqa: F401
    assert "flash_attn" not in sys.modules


def test_transformers_does_not_take_the_stubs_for_flash_attention():
    """Up to 5.8 it looks up which package an installed flash_attn is of, and a stub is of none."""
    program = """
from transformers.utils import import_utils

from rlcanary.adapters.stubs import KERNELS, stubbed


class OfOlder(dict):
    def get(self, name, default=None):
        return self[name]


import_utils.PACKAGE_DISTRIBUTION_MAPPING = OfOlder(import_utils.PACKAGE_DISTRIBUTION_MAPPING)
with stubbed(KERNELS):
    import transformers.trainer
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_typed_dicts_are_the_older_ones_again():
    before = typing.TypedDict
    with newer_typed_dicts():
        assert typing.TypedDict.__module__ != "nothing"
    assert typing.TypedDict is before


def test_all_of_an_absent_package_is_there_for_the_imports_of_the_block_and_fails_when_it_is_called():
    with absent("no_such_server"):
        import no_such_server.deep.down as module
        from no_such_server.other import Server, remote

        class Mine(Server, remote.Base):
            @remote(retries=3)
            def run(self):
                return 1

    assert not any(name.startswith("no_such_server") for name in sys.modules)
    for call in (module.anything, Server, Mine().run, remote.other):
        with pytest.raises(NotImplementedError, match=r"no_such_server.* is a stub"):
            call()


def test_an_installed_package_is_not_taken_for_absent_and_a_part_that_it_lacks_is():
    with absent("torch", "torch.no_such_part"):
        import torch
        import torch.no_such_part
    assert torch.tensor([1]).item() == 1
    assert "torch.no_such_part" not in sys.modules
