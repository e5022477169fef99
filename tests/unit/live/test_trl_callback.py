"""The audit in TRL's own `train()`: it finds the loss type whose micro-batches are averaged, and changes no weight."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slurm_cluster import free_ports

from rlcanary import live
from rlcanary.grpo.engines.one_engine import VLLM_CPU_DEFAULTS
from rlcanary.tiny_models import tiny_llama, tiny_mixtral

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def train(
    folder: Path,
    audited: bool = True,
    spoil: Callable[[Any], None] = lambda _: None,
    resume: bool | None = None,
    model: Any = None,
    **settings: Any,
) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """Take three updates on completions of different lengths.

    Args:
        folder: gets the model and the run.
        audited: whether the callback is added.
        spoil: changes the trainer before that.
        resume: goes on from the last checkpoint in the folder.
        model: is trained; None trains a small Llama.
        settings: of the `GRPOConfig`.

    Returns:
        The callback, the trained weights and the trainer.
    """
    from live_trl_ranks import trainer_of

    torch.manual_seed(0)
    model = model or tiny_llama()
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    trainer = trainer_of(model, folder, **settings)
    spoil(trainer)
    callback = live.trl(trainer, every=1) if audited else None
    if callback:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return callback, trainer.model.state_dict(), trainer


@pytest.mark.parametrize(
    "settings",
    [{"loss_type": "dapo"}, {"loss_type": "grpo", "beta": 0.1}, {"loss_type": "dr_grpo", "num_iterations": 2}],
    ids=lambda settings: settings["loss_type"],
)
def test_what_trl_does_as_it_says_has_no_finding(tmp_path: Path, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rlcanary")
        callback, _, trainer = train(tmp_path, **settings)
    assert (callback.audit.audited, list(callback.audit.findings)) == (3, [])
    assert [line["canary/findings"] for line in trainer.state.log_history if "canary/findings" in line][-1] == 0


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (tiny_mixtral, {}),  # whose loss has a term for the balance of the experts
        (tiny_llama, {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 2.0}),
        (tiny_llama, {"mask_truncated_completions": True}),  # which leaves a micro-batch without a trained token
    ],
    ids=["router", "adaptive entropy", "masked micro-batch"],
)
def test_terms_and_masks_of_trl_of_which_the_conventions_say_nothing_are_no_wrong_numbers(
    tmp_path: Path, model: Callable[[], Any], settings: dict[str, Any]
) -> None:
    callback, _, _ = train(tmp_path, model=model(), loss_type="dapo", **settings)
    assert (callback.audit.audited, list(callback.audit.findings)) == (3, [])


def test_means_of_micro_batches_are_found_and_the_weights_are_those_of_a_run_without_the_audit(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rlcanary: gradient"):
        callback, weights, _ = train(tmp_path / "audited", loss_type="bnpo")
    assert any("the mean of the losses of 2 micro-batches" in finding.message for finding in callback.audit.findings), (
        list(map(str, callback.audit.findings))
    )
    _, others, _ = train(tmp_path / "alone", audited=False, loss_type="bnpo")
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_generation_that_is_colder_than_it_is_scored_is_found(tmp_path: Path) -> None:
    def colder(trainer: Any) -> None:
        trainer.generation_config.temperature = 0.5

    with pytest.warns(UserWarning, match="rlcanary: sampling.surprise"):
        callback, _, _ = train(tmp_path, spoil=colder, max_steps=16)
    (finding,) = callback.audit.findings
    assert "samples of the present weights are more likely than the policy's own" in finding.message


def test_wrong_numbers_in_the_log_and_wrong_advantages_are_found_and_stand_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def spoiled(trainer: Any) -> None:
        loss, sample, log = trainer._compute_loss, trainer._generate_and_score_completions, trainer.log

        def logging_twice_the_entropy(*arguments: Any) -> Any:
            found = loss(*arguments)
            trainer._metrics["train"]["entropy"][-1] *= 2
            return found

        def halving_advantages(inputs: Any) -> Any:
            output = sample(inputs)
            output["advantages"] = output["advantages"] / 2
            trainer._metrics["train"]["completions/mean_length"][-1] += 1
            return output

        def logging_twice_the_norm(logs: dict[str, float], *arguments: Any) -> None:
            log({**logs, "grad_norm": 2 * logs["grad_norm"]} if "grad_norm" in logs else logs, *arguments)

        trainer._compute_loss, trainer.log = logging_twice_the_entropy, logging_twice_the_norm
        trainer._generate_and_score_completions = halving_advantages

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    with pytest.warns(UserWarning, match="rlcanary"):
        callback, _, _ = train(tmp_path, spoil=spoiled, beta=0.1, max_grad_norm=0.0, report_to=["tensorboard"])
    found = {finding.invariant for finding in callback.audit.findings}
    assert found == {"advantages", "logged.entropy", "logged.grad_norm", "logged.length"}
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert events.Scalars("train/canary/findings")[-1].value == 4
    assert events.Scalars("train/canary/advantages")


@pytest.mark.parametrize(("loss_type", "found"), [("dapo", None), ("bnpo", "gradient")])
def test_low_rank_adapters_are_audited_like_a_whole_model(tmp_path: Path, loss_type: str, found: str | None) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rlcanary: gradient")
        callback, _, _ = train(tmp_path, loss_type=loss_type, peft_config=adapters)
    kinds = {str(finding).partition(".")[0] for finding in callback.audit.findings}
    assert (callback.audit.audited, kinds) == (3, set() if found is None else {found})


def test_weights_that_no_longer_reach_vllm_are_found(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    script = Path(__file__).parents[2] / "support/live_runs/live_trl_vllm.py"
    # TRL finds 29500 free long before vLLM listens there; another session may be as far.
    port = {"MASTER_PORT": str(free_ports(1)[0])}
    environment = {**os.environ, **VLLM_CPU_DEFAULTS, **port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["audited"] == 20
    assert "sampling.drift" in told["found"][0][1]
    assert all(since > 10 for since, _ in told["found"])  # until then they reached it


def test_a_run_that_is_resumed_goes_on_with_its_evidence(tmp_path: Path) -> None:
    first, _, _ = train(tmp_path, max_steps=1, save_steps=1)
    resumed, _, _ = train(tmp_path, resume=True, max_steps=2, save_strategy="no")
    assert (first.audit.audited, resumed.audit.audited, resumed.audit.updates) == (1, 2, 2)


def test_an_update_of_two_ranks_is_judged_as_one(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).parents[2] / "support/live_runs/live_trl_ranks.py"
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, tmp_path / "model", tmp_path], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["ranks"] == 2
    assert first["audited"] == {"dapo": 3, "bnpo": 3}
    assert first["found"]["dapo"] == []
    assert "the mean of the losses of 4 micro-batches" in first["found"]["bnpo"][0]
