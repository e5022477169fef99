"""A framework of another version than a hook was written for is a warning, and its run goes on."""

import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlcanary import live
from rlcanary.contract.presets import GRPO
from rlcanary.live.hooks import fitting
from rlcanary.live.hooks.environment import audit_of


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_told", set())


def module(install: object) -> str:
    """Make a module with a hook."""
    made = ModuleType("a_hook")
    made.install = install  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    return made.__name__


def test_a_function_with_other_parameters_is_told_once_with_both_versions() -> None:
    def changed(self: object, rows: object) -> None: ...

    name = module(lambda: fitting.require(changed, "self", "data"))
    with pytest.warns(
        UserWarning, match=r"this run of torch \d.* is not audited, .* written for torch 0.1: .*changed takes"
    ):
        fitting.installed("torch", "0.1", name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitting.installed("torch", "0.1", name)


def test_a_framework_that_lacks_a_module_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="this run of verl .* is not audited, .*No module named 'a_hook_of_nothing'"):
        fitting.installed("verl", "0.9", "a_hook_of_nothing")


def test_a_hook_that_fails_in_a_run_returns_nothing() -> None:
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert fitting.attempted("verl", "0.9", lambda: 1 // 0) is None


def test_a_hook_that_fails_ends_no_run_that_makes_errors_of_warnings() -> None:
    with warnings.catch_warnings(action="error"):
        assert fitting.attempted("verl", "0.9", lambda: 1 // 0) is None


def test_a_trainer_of_another_trl_is_trained_without_the_audit() -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(loss_type="of my own", output_dir="out", max_completion_length=8),
        state=SimpleNamespace(global_step=0),
    )
    with pytest.warns(UserWarning, match="this run of trl .* written for trl 1.16: .*_compute_loss"):
        callback = live.trl(trainer)
    callback.on_optimizer_step(None, None, None)
    assert not hasattr(trainer, "_compute_loss")


def test_a_loss_of_another_torchrl_is_trained_without_the_audit() -> None:
    with pytest.warns(UserWarning, match="this run of torchrl .* is not audited"):
        assert live.torchrl(SimpleNamespace(loss_module=SimpleNamespace())) is None


def test_an_audited_update_without_logprobs_is_told_once() -> None:
    audit = live.Audit(GRPO, every=1)
    mask, logprobs = torch.ones(2, 3).bool(), torch.zeros(2, 3)
    told = "update 0 is not judged: no logprobs with a gradient were given to `watch`"
    with pytest.warns(UserWarning, match=told), audit.update(mask=mask) as update:
        update.watch(logprobs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with audit.update(mask=mask):
            pass
    assert audit.audited == 0


def test_nothing_of_verl_is_watched_where_one_function_does_not_fit() -> None:
    pytest.importorskip("verl")
    script = """
from verl.trainer.ppo import core_algos
from verl.workers.engine.base import BaseEngine

core_algos.ADV_ESTIMATOR_REGISTRY["rloo"] = lambda rewards: None
before = BaseEngine.train_batch
import rlcanary.live.hooks.verl
print(BaseEngine.train_batch is before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
    assert "is not audited" in done.stderr


@pytest.mark.parametrize("every", ["often", "0", ""])
def test_a_setting_that_is_no_number_is_named_in_the_warning(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCANARY_LIVE_EVERY", every)
    with pytest.warns(UserWarning, match=f"is not audited, .*RLCANARY_LIVE_EVERY='{every}' has to be a number"):
        fitting.attempted("verl", "0.9", lambda: audit_of(None))


def test_a_setting_that_is_no_number_ends_no_run_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    from rlcanary.live.hooks.verl import workers

    monkeypatch.setenv("RLCANARY_LIVE_EVERY", "often")
    returned = torch.ones(2, 3), torch.ones(2, 3)
    estimator = workers.watched_estimator(lambda *_: returned, "grpo")
    with pytest.warns(UserWarning, match="RLCANARY_LIVE_EVERY='often'"):
        assert estimator(torch.ones(2, 3), torch.ones(2, 3), ["a", "a"]) is returned
