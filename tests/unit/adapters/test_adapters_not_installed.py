"""Adapters of codebases that are not on the Python package index for this environment: what holds without them."""

import importlib
import importlib.util
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from rlcanary.adapters import BUNDLED, NotProvided, load_adapter
from rlcanary.adapters.frameworks import forget, usable
from rlcanary.adapters.nemo_rl import options as nemo
from rlcanary.adapters.openrlhf import options as openrlhf
from rlcanary.adapters.prime_rl import adapter as prime_rl
from rlcanary.errors import UserError

# As `ClippedPGLossConfig` and `AdvEstimatorConfig` have them.
NEMO_LOSS = {
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_cispo": False,
}
NEMO_ADVANTAGE = {"normalize_rewards": True, "use_leave_one_out_baseline": True}


def nemo_conventions(loss, advantage, policy):
    return nemo.conventions_of(
        SimpleNamespace(**{**NEMO_LOSS, **loss}),
        SimpleNamespace(**{**NEMO_ADVANTAGE, **advantage}),
        {**nemo.POLICY, **policy},
    )


def openrlhf_conventions(settings):
    return openrlhf.conventions_of({**openrlhf.DEFAULTS, **settings})


@pytest.mark.parametrize("name", ["nemo_rl", "openrlhf", "prime_rl", "skyrl"])
def test_a_codebase_that_is_not_there_is_one_line_that_says_so(name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=f"^{name} is not installed: ") as raised:
        load_adapter(name)
    assert "\n" not in str(raised.value)


def test_the_command_ends_with_exit_code_2_and_nothing_else():
    if importlib.util.find_spec("nemo_rl"):
        pytest.skip("nemo_rl is installed")
    command = [sys.executable, "-m", "rlcanary", "check", "nemo_rl"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("rlcanary: nemo_rl is not ")
    assert run.stderr.count("\n") == 1
    assert run.stdout == ""


def test_importing_every_bundled_adapter_imports_no_framework():
    modules = sorted({target.partition(":")[0] for target in BUNDLED.values()})
    frameworks = {"torch", "ray", "transformers", "trl", "verl", "torchrl", "nemo_rl", "openrlhf", "prime_rl", "skyrl"}
    code = f"import sys, importlib; [importlib.import_module(name) for name in {modules}]; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not frameworks & set(run.stdout.split())


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_baseline": "mean"},
        {"advantage_scale": "none"},
        {"objective": "cispo"},
        {"aggregation": "sequence_mean", "ratio_level": "sequence"},
        {"clip_low": 0.1, "clip_high": 0.28},
        {"dual_clip": 3.0},
        {"kl_coef": 0.0},
        {"kl_estimator": "k1", "kl_coef": 0.5},
        {"kl_placement": "reward"},
        {"kl_output_clamp": None, "kl_input_clamp": None},
        {"importance_level": "token", "importance_high": 2.0},
        {"importance_level": "token", "importance_mode": "mask", "importance_low": 0.5, "importance_high": 2.0},
        {"temperature": 0.7, "max_grad_norm": None, "mini_batches": 2},
        {"overlong_buffer": 16, "overlong_penalty": 0.5},
    ],
    ids=str,
)
def test_nemo_rl_settings_say_the_conventions_they_were_made_for(changes):
    conventions = nemo_conventions({}, {}, {})
    settings = nemo.settings_for({}, {}, {}, conventions, changes)
    assert nemo_conventions(*settings) == conventions.replace(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_coef": 0.1},
        {"kl_estimator": "abs"},
        {"advantage_scale": "batch"},
        {"ratio_level": "sequence"},
        {"objective": "cispo", "dual_clip": 3.0},
        {"importance_level": "sequence"},
    ],
    ids=str,
)
def test_what_nemo_rl_has_no_option_for_is_declined(changes):
    with pytest.raises(NotProvided):
        nemo.settings_for({}, {}, {}, nemo_conventions({}, {}, {}), changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_scale": "none"},
        {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
        {"clip_low": 0.1, "clip_high": 0.28},
        {"dual_clip": 3.0},
        {"kl_coef": 0.5, "kl_placement": "loss", "kl_estimator": "k3"},
        {"entropy_coef": 0.1},
        {"importance_level": "token", "importance_low": 0.0, "importance_high": 2.0},
        {"importance_level": "token", "importance_mode": "mask", "importance_low": 0.5, "importance_high": 2.0},
    ],
    ids=str,
)
def test_openrlhf_settings_say_the_conventions_they_were_made_for(changes):
    conventions = openrlhf_conventions({})
    assert openrlhf_conventions(openrlhf.settings_for({}, conventions, changes)) == conventions.replace(**changes)


def test_gspo_of_openrlhf_averages_over_sequences_that_have_a_token():
    changes = {"ratio_level": "sequence", "aggregation": "sequence_mean_nonempty"}
    settings = openrlhf.settings_for({}, openrlhf_conventions({}), changes)
    assert settings == {"actor.policy_loss_type": "gspo"}
    made = openrlhf_conventions(settings)
    assert (made.ratio_level, made.aggregation, made.log_ratio_clamp) == ("sequence", "sequence_mean_nonempty", None)


@pytest.mark.parametrize(
    "changes", [{"objective": "cispo"}, {"advantage_scale": "batch"}, {"importance_level": "sequence"}], ids=str
)
def test_what_openrlhf_has_no_option_for_is_declined(changes):
    with pytest.raises(NotProvided):
        openrlhf.settings_for({}, openrlhf_conventions({}), changes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algo.advantage.estimator": "remax"}, "group_norm, dr_grpo, rloo, gae"),
        ({"algo.advantage.is_correction_enable": True}, "lower threshold of 'tis'"),
        (
            {"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_type": "seq-mask-tis"},
            "seq-mask-tis",
        ),
    ],
    ids=str,
)
def test_openrlhf_settings_without_words_in_the_conventions_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        openrlhf.check_settings({**openrlhf.DEFAULTS, **settings})


def test_prime_rl_neither_clips_nor_scales():
    made = prime_rl.CONVENTIONS
    assert (made.clip_low, made.clip_high, made.advantage_scale) == (None, None, "none")


def run_without(module, *command, cwd):
    """Run a command in which a module cannot be found."""
    (cwd / "without_it.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    code = (
        f"import runpy, sys, without_it; sys.argv = {list(command)}; runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("adapter", ["reference", "trl"])
def test_without_torch_both_commands_end_with_one_line_and_exit_code_2(adapter, tmp_path):
    if importlib.util.find_spec(adapter) is None and adapter != "reference":
        pytest.skip(f"{adapter} is not installed")
    typed = run_without("torch", "rlcanary", "check", adapter, cwd=tmp_path)
    assert (typed.returncode, typed.stdout, typed.stderr.count("\n")) == (2, "", 1), typed.stderr
    assert "torch" in typed.stderr
    collected = run_without("torch", "pytest", f"--canary={adapter}", "-q", cwd=tmp_path)
    assert (collected.returncode, collected.stderr) == (2, ""), collected.stdout
    (line,) = (line for line in collected.stdout.splitlines() if "torch" in line)
    assert f"--canary: {typed.stderr.strip().removeprefix('rlcanary: ')}" in line


def package(folder, name, version=None, **modules):
    """A framework with these modules, given as source, and with metadata where it has a version."""
    for module, source in {"__init__": "", **modules}.items():
        path = folder / name / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    if version is not None:
        described = folder / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "source", "said"),
    [
        ("1.7.1", "", "1.7.1: it is older than 1.16"),
        ("1.16.2", "import no_such_dependency", "1.16.2: no_such_dependency"),
        ("1.17.0.dev0", "import someframe.gone", "no module someframe.gone"),
        (
            "1.17.0.dev0",
            "import pluggy.gone",
            f"the installed pluggy {metadata.version('pluggy')} has no module pluggy.gone",
        ),
        (None, "from someframe import absent", "cannot import name 'absent'"),
        (None, "raise AssertionError('wants another\\ntorch')", "AssertionError: wants another"),
    ],
)
def test_a_release_that_does_not_fit_is_one_line_with_the_cause(version, source, said, tmp_path, monkeypatch, request):
    package(tmp_path, "someframe", version, inner=source)
    monkeypatch.syspath_prepend(str(tmp_path))
    request.addfinalizer(lambda: forget("someframe"))
    with pytest.raises(UserError) as raised, usable("someframe", "", "someframe 1.16", at_least="1.16"):
        importlib.import_module("someframe.inner")
    assert "written for someframe 1.16" in str(raised.value)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_help_names_every_bundled_adapter():
    command = [sys.executable, "-m", "rlcanary", "check", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(BUNDLED) <= set(
        run.stdout.replace(",", " ").split("ADAPTER is a bundled adapter (")[1].split(")")[0].split()
    )
