"""Options of installed frameworks mean the conventions that their adapters declare."""

import subprocess
import sys

import pytest

from rlcanary.adapters import NotProvided, load_adapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.presets import CODEBASES

CHECKS = {check.id: check for check in all_checks()}
# What fails on released torchrl (loss.clipping, loss.masked_positions) and verl (loss.metrics) is in tests/expected.
DECLARED = {
    "torchrl": (
        "advantage.declared_formula",
        "advantage.row_order",
        "entropy.is_shannon_entropy",
        "kl.declared_estimator",
        "loss.declared_value",
        "loss.declared_gradient",
    ),
    "trl": ("loss.declared_value", "loss.declared_gradient"),
    "verl": (
        "advantage.declared_formula",
        "advantage.single_completion",
        "kl.declared_estimator",
        "loss.declared_value",
        "loss.declared_gradient",
        "loss.clipping",
        "split.micro_batches",
        "split.ranks",
    ),
}
OPTIONS = {
    "torchrl": [
        {},
        {"aggregation": "sequence_mean"},
        {"entropy_coef": 0.0},
        {"entropy_coef": 0.1, "aggregation": "sequence_mean"},
        {"clip_low": 0.1, "clip_high": 0.28},
    ],
    "trl": [
        {"objective": "sapo", "aggregation": "sequence_mean"},
        {"objective": "sapo", "aggregation": "sequence_mean", "sapo_temperature_negative": 0.5},
        {"off_policy_mask": 0.05},
    ],
    "verl": [  # what it does by default is in tests/integration/test_released_frameworks.py
        {"aggregation": "sequence_sum"},
        {"aggregation": "constant", "aggregation_constant": 7.0},
        {"objective": "cispo"},
        {"aggregation": "sequence_mean", "ratio_level": "sequence"},
        {"kl_coef": 0.5, "kl_estimator": "k1"},
        {"kl_coef": 0.5, "kl_estimator": "k2"},
        {"kl_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.1},
        {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5},
        {"importance_level": "token", "importance_high": 1.2},
        {"importance_level": "sequence", "importance_high": 1.2},
        {"importance_level": "sequence", "importance_mode": "mask", "importance_low": 0.01, "importance_high": 50.0},
        {"advantage_scale": "none"},
        {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
        {"objective": "sapo", "aggregation": "sequence_mean", "sapo_temperature_negative": 1.5},
    ],
}
# Estimators of credit per token, and the checks that they pass; what they need of each other changes together.
ESTIMATORS = {
    "gae": {
        "token_credit": "gae",
        "advantage_baseline": "none",
        "whitening": "mean_std",
        "discount": 0.9,
        "gae_lambda": 0.8,
    },
    "reinforce_plus_plus": {
        "token_credit": "returns",
        "advantage_baseline": "none",
        "whitening": "mean_std",
        "discount": 0.9,
    },
    "reinforce_plus_plus_baseline": {"whitening": "mean_std"},
    "opo": {"baseline_weighting": "tokens"},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_verls_estimators_divide_rewards_among_tokens_as_they_declare(estimator):
    changes = {"advantage_scale": "none", **ESTIMATORS[estimator]}
    adapter = installed("verl").configured(**changes)
    assert adapter.algorithm["adv_estimator"] == estimator
    assert {name: getattr(adapter.conventions, name) for name in changes} == changes
    judged = [check for check in CHECKS.values() if check.area == "credit"]
    statuses = {check.id: run_check(check, adapter, "verl").status for check in judged}
    assert set(statuses.values()) == {"pass", "not-provided"}
    assert statuses["credit.declared_advantages"] == "pass"


def test_verls_critic_has_the_declared_loss():
    adapter = installed("verl").configured(value_clip=0.2, value_aggregation="sequence_mean")
    statuses = {
        check.id: run_check(check, adapter, "verl").status for check in CHECKS.values() if check.area == "value"
    }
    assert statuses.pop("value.masked_positions") == "fail"
    assert set(statuses.values()) == {"pass"}


def test_verls_gmpo_grows_with_the_number_of_micro_batches():
    given = {"objective": "gmpo", "aggregation": "sequence_mean"}
    adapter = installed("verl").configured(**given)
    statuses = {check_id: run_check(CHECKS[check_id], adapter, "verl").status for check_id in DECLARED["verl"]}
    wrong = {"split.micro_batches", "split.ranks", "loss.clipping"}
    assert {check_id for check_id, status in statuses.items() if status == "fail"} == wrong


MISSING_OPTIONS = {
    "torchrl": [{"advantage_scale": "none"}, {"dual_clip": 3.0}, {"kl_estimator": "k1"}],
    "verl": [{"dual_clip": None}, {"clip_low": None}, {"kl_ratio_weighted": True}, {"aggregation": "group_token_mean"}],
}


def installed(framework):
    pytest.importorskip(framework)
    return load_adapter(framework)


def cases(of_frameworks):
    return [(framework, changes) for framework, listed in of_frameworks.items() for changes in listed]


@pytest.mark.parametrize(("framework", "changes"), cases(OPTIONS), ids=str)
def test_a_framework_computes_what_its_options_are_said_to_mean(framework, changes):
    adapter = installed(framework).configured(**changes)
    assert {name: getattr(adapter.conventions, name) for name in changes} == changes
    # How a batch is split matters where the options say what the loss is divided by, and by default.
    divides = not changes or not changes.keys().isdisjoint({"aggregation", "objective", "importance_mode"})
    judged = [check_id for check_id in DECLARED[framework] if divides or not check_id.startswith("split.")]
    statuses = {check_id: run_check(CHECKS[check_id], adapter, framework).status for check_id in judged}
    assert statuses == dict.fromkeys(judged, "pass")


@pytest.mark.parametrize("framework", MISSING_OPTIONS)
def test_the_preset_of_losses_and_advantages_is_what_the_defaults_declare(framework):
    of_a_run = (
        *("temperature", "old_logprobs", "training_dropout", "max_grad_norm", "mini_batches", "schedule_advances"),
        *("sync_while_sampling", "discount", "value_coef", "supervised_aggregation", "distillation_divergence"),
        *("answer_taken", "best_at_k", "long_prompt"),
    )
    preset = CODEBASES[framework]
    declared = installed(framework).conventions
    assert declared.replace(**{name: getattr(preset, name) for name in of_a_run}) == preset


@pytest.mark.parametrize(("framework", "changes"), cases(MISSING_OPTIONS), ids=str)
def test_a_change_for_which_a_framework_has_no_option_is_declined(framework, changes):
    with pytest.raises(NotProvided, match=f"no setting of {framework}"):
        installed(framework).configured(**changes)


@pytest.mark.parametrize("framework", OPTIONS)
def test_without_the_framework_the_command_says_what_to_install(framework):
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{framework}":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from rlcanary.cli import main
sys.exit(main())
"""
    run = subprocess.run([sys.executable, "-c", code, "check", framework], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"rlcanary: {framework} is not installed: pip install 'rlcanary[{framework}]'\n"
