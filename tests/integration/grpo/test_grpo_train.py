"""The bundled trainer end to end: a plan in, a log out, on a tiny model from scratch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcanary.errors import UserError
from rlcanary.grpo import train as loop
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.plan.models import ScratchSettings, character_tokenizer, save_model, scratch_model
from rlcanary.grpo.plan.plan import Plan
from rlcanary.grpo.plan.reading import plan_of
from rlcanary.grpo.sync.sync import sync_weights
from rlcanary.grpo.train import train
from rlcanary.grpo.training import trainer, updates
from rlcanary.grpo.training.checkpoint import CheckpointError
from rlcanary.grpo.training.critic import update_critic
from rlcanary.grpo.training.run import open_run
from rlcanary.live import Audit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def a_plan(folder: Path, steps: int = 4, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "run": {"folder": str(folder), "steps": steps},
        "model": {"scratch": {"characters": "0123456789+="}},
        "data": {"datasets": [{"name": "arithmetic", "count": 12, "largest": 4}], "chat_template": False},
        "sampling": {"max_new_tokens": 3},
        "schedule": {"prompts_per_step": 4, "group_size": 4},
        "conventions": {"old_logprobs": "sampler", "entropy_coef": 0.01},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            given.setdefault(section, {})[name] = value
        else:
            given[section] = value
    return plan_of(given)


def log_of(folder: Path) -> list[dict[str, float]]:
    """Without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("seconds/")} for line in lines]


def test_each_step_is_logged_and_moves_the_policy_version(tmp_path: Path) -> None:
    train(a_plan(tmp_path))
    log = log_of(tmp_path)
    assert [line["step"] for line in log] == [0, 1, 2, 3]
    assert [line["policy_version"] for line in log] == [1, 2, 3, 4]
    assert all(abs(line[name] - 1) < 1e-4 for line in log for name in ("ratio_min", "ratio_max"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"scratch": {"characters": "0123456789+="}, "dtype": "bfloat16"}},
        {"sampling": {"max_new_tokens": 3, "temperature": 0.7, "stop_sequences": ["1"]}},
        {"sampling": {"max_new_tokens": 3, "logprobs": "raw"}, "lora": {"rank": 2}},
        {
            "schedule": {
                "prompts_per_step": 4,
                "group_size": 4,
                "epochs_per_step": 2,
                "sync_every": 2,
                "max_staleness": 7,
            }
        },
        {"environment": {"max_turns": 1}, "data": {"datasets": [{"name": "arithmetic", "count": 12, "largest": 4}]}},
    ],
    ids=["bfloat16", "another temperature", "raw logprobs and adapters", "stale rows", "conversations"],
)
def test_a_healthy_run_is_never_stopped(tmp_path: Path, changes: dict[str, Any]) -> None:
    train(a_plan(tmp_path, **changes, optimizer={"learning_rate": 0.01}))
    assert len(log_of(tmp_path)) == 4


def test_the_same_plan_gives_the_same_numbers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(a_plan(tmp_path / name))
    assert log_of(tmp_path / "one") == log_of(tmp_path / "two")


def test_requests_share_batches_in_the_trainers_process(tmp_path: Path) -> None:
    role = {"sampler": {"options": {"min_batch_size": 4, "batching_timeout": 60.0}}}
    batches: list[int] = []
    generate = TransformersPolicy.generate_seeded

    def counted(self: Any, prompts: Any, *rest: Any) -> Any:
        batches.append(len(prompts))
        return generate(self, prompts, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TransformersPolicy, "generate_seeded", counted)
        train(a_plan(tmp_path, steps=2, roles=role))
    assert batches == [4, 4]
    assert all(abs(line["ratio_mean"] - 1) < 1e-4 for line in log_of(tmp_path))


def test_groups_of_completions_requested_one_by_one_are_trained_on(tmp_path: Path) -> None:
    outcome = train(a_plan(tmp_path, 2, roles={"sampler": {"requests": "completion"}}))
    assert outcome.account.fates["used"] == outcome.account.entered == 8
    assert [line["policy_version"] for line in log_of(tmp_path)] == [1, 2]
    assert all(abs(line[name] - 1) < 1e-4 for line in log_of(tmp_path) for name in ("ratio_min", "ratio_max"))


# Rewards that differ from the first step on.
PARTIAL = {"verifier": {"options": {"exact": {"partial": True}}}}
SETTINGS = {
    "float32": {},
    "bfloat16": {"model__dtype": "bfloat16"},
    "reference model": {"conventions__kl_coef": 0.1, "schedule__refresh_reference_every": 2},
    "a refresh without a reference model": {"schedule__refresh_reference_every": 1},
    "adapters in bfloat16": {"lora": {"rank": 2}, "model__dtype": "bfloat16"},
    "adapters and a reference model": {
        "lora": {"targets": ["q_proj", "down_proj"]},
        "conventions__kl_coef": 0.1,
        "schedule__refresh_reference_every": 2,
    },
    "a critic, beside adapters": {
        "lora": {"rank": 2},
        "critic": {"warmup_updates": 3},
        "roles": PARTIAL,
        "conventions": {"preset": "ppo", "value_aggregation": "sequence_mean"},
        "schedule__epochs_per_step": 2,
        "schedule__rows_per_micro_batch": 4,
        "schedule__max_staleness": 1,
    },
    "a checkpoint between two syncs": {
        "schedule__sync_every": 3,
        "schedule__max_staleness": 2,
        "optimizer__learning_rate": 0.02,
        "roles": PARTIAL,
    },
    "several updates per step": {
        "schedule__rows_per_update": 8,
        "schedule__rows_per_micro_batch": 2,
        "schedule__max_staleness": 1,
        "conventions__old_logprobs": "trainer",
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_logs_what_a_run_without_a_stop_logs(tmp_path: Path, name: str) -> None:
    changes = SETTINGS[name] | {"run__checkpoint_every": 2}
    train(a_plan(tmp_path / "whole", 5, **changes))
    with pytest.raises(KeyboardInterrupt):
        train(a_plan(tmp_path / "stopped", 5, **changes), on_step=stop_at(3))
    train(a_plan(tmp_path / "stopped", 5, **changes), resume=True)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    newest = [
        torch.load(tmp_path / run / "checkpoints/step-000004.pt", weights_only=True) for run in ("whole", "stopped")
    ]
    assert all(torch.equal(newest[0]["model"][key], newest[1]["model"][key]) for key in newest[0]["model"])


def test_dropout_is_resumed_with_the_random_numbers_that_it_would_have_drawn(tmp_path: Path) -> None:
    model = scratch_model(ScratchSettings(), seed=0)
    model.config.attention_dropout = 0.2
    save_model(model, character_tokenizer(ScratchSettings().characters), tmp_path / "model")
    changes = {
        "model": {"path": str(tmp_path / "model")},
        "conventions__training_dropout": True,
        "run__checkpoint_every": 2,
        "roles": PARTIAL,
    }
    train(a_plan(tmp_path / "whole", 4, **changes))
    with pytest.raises(KeyboardInterrupt):
        train(a_plan(tmp_path / "stopped", 4, **changes), on_step=stop_at(2))
    train(a_plan(tmp_path / "stopped", 4, **changes), resume=True)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    assert any(line["grad_norm"] > 0 for line in log_of(tmp_path / "whole"))


def stop_at(step: int) -> Any:
    def watch(current: int, metrics: Any) -> None:
        if current == step:
            raise KeyboardInterrupt

    return watch


def test_adapters_are_trained_alone_and_engines_get_them_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, gaps = torch.tensor([[5, 6, 7, 8]]), []
    models: list[Any] = []

    def watched(model: Any, endpoints: Any, transport: Any) -> int:
        version = sync_weights(model, endpoints, transport)
        models[:] = model, endpoints[0].engine.model
        with torch.no_grad():
            trainer_V, engine_V = (each(ids).logits.log_softmax(-1) for each in models)
        gaps.append(float((trainer_V - engine_V).abs().max()))
        return version

    monkeypatch.setattr(loop, "sync_weights", watched)
    train(a_plan(tmp_path, 3, lora={"rank": 4}, conventions__kl_coef=0.1))
    log = log_of(tmp_path)
    assert all(abs(line[name] - 1) < 1e-4 for line in log for name in ("ratio_min", "ratio_max"))
    assert (log[0]["kl"], log[2]["kl"] > 0) == (0, True)
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    # The engine began with the loaded weights, as they are in the folder.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    trainer, engine = (each.state_dict() for each in models)
    adapted = {name.rpartition(".")[0] for name in trainer if "lora_A" in name}
    assert len(adapted) == 2 * 7
    assert trainer.keys() - loaded.keys() == {f"{name}.lora_{part}" for name in adapted for part in "AB"}
    assert all(torch.equal(trainer[name], weight) for name, weight in loaded.items())
    moved = {name for name, weight in loaded.items() if not torch.equal(engine[name], weight)}
    assert moved == {f"{name}.weight" for name in adapted}


def test_ppo_trains_on_the_advantages_and_returns_of_its_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[float] = []

    def watched(critic: Any, batch: Any, given: Any, *settings: Any) -> dict[str, float]:
        advantages, returns, errors = [], [], []
        for row, reward in enumerate(batch.rewards.tolist()):
            ids = batch.input_ids[row][batch.attention_mask[row]]
            count = int(batch.completion_mask[row].sum())
            with torch.no_grad():
                scored = critic.model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0, :, 0]
            values = [*scored[-count - 1 : -1].tolist(), 0.0]
            for first in range(count):
                steps = range(first, count)
                gains = [(reward if at == count - 1 else 0.0) + values[at + 1] - values[at] for at in steps]
                advantages.append(sum(gain * 0.95**later for later, gain in enumerate(gains)))
                returns.append(advantages[-1] + values[first])
                errors.append(advantages[-1] ** 2)
        plain = torch.tensor(advantages)
        torch.testing.assert_close(given.returns[given.mask], torch.tensor(returns), atol=1e-4, rtol=0)
        whitened = (plain - plain.mean()) / plain.std()
        torch.testing.assert_close(given.advantages[given.mask], whitened, atol=1e-3, rtol=0)
        metrics = update_critic(critic, batch, given, *settings)
        # One update per step: values are still the old ones, so that nothing is clipped.
        assert metrics["value_loss"] == pytest.approx(0.5 * sum(errors) / len(errors), rel=1e-3)
        assert metrics["value_clip_fraction"] == 0
        judged.append(metrics["explained_variance"])
        return metrics

    monkeypatch.setattr(updates, "update_critic", watched)
    train(a_plan(tmp_path, 3, conventions={"preset": "ppo"}, critic={}, roles=PARTIAL))
    assert len(judged) == 3
    assert judged[0] == 0 != judged[2]
    log = log_of(tmp_path)
    assert [line["explained_variance"] for line in log] == judged
    assert all(line["critic_lr"] == 1e-3 and line["critic_grad_norm"] > 0 for line in log)


HELD_OUT = {"datasets": [{"name": "arithmetic", "count": 5, "seed": 1}], "every": 2}


def test_an_evaluation_is_logged_when_it_is_due_and_changes_nothing_else(tmp_path: Path) -> None:
    train(a_plan(tmp_path / "without", 5))
    train(a_plan(tmp_path / "with", 5, evaluation=HELD_OUT))
    log = log_of(tmp_path / "with")
    assert [line["step"] for line in log if "evaluation/reward" in line] == [0, 2, 4]
    # Problems of verifiers are counted wherever they come up.
    own = ("evaluation/", "verifier/")
    with_and_without = [
        [{name: value for name, value in line.items() if not name.startswith(own)} for line in lines]
        for lines in (log, log_of(tmp_path / "without"))
    ]
    assert with_and_without[0] == with_and_without[1]


def test_an_evaluation_is_resumed_to_the_same_numbers(tmp_path: Path) -> None:
    changes = {
        "evaluation": HELD_OUT,
        "run__checkpoint_every": 1,
        "conventions__evaluation_temperature": 1.0,
        "roles__verifier": {"options": {"exact": {"partial": True}}},
    }
    train(a_plan(tmp_path / "whole", 3, **changes))
    with pytest.raises(KeyboardInterrupt):
        train(a_plan(tmp_path / "stopped", 3, **changes), on_step=stop_at(1))
    train(a_plan(tmp_path / "stopped", 3, **changes), resume=True)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    assert log_of(tmp_path / "whole")[2]["evaluation/reward"] > 0


def test_an_evaluation_asks_the_engines_that_get_the_weights(tmp_path: Path) -> None:
    with open_run(a_plan(tmp_path, evaluation=HELD_OUT)) as run:
        assert run.evaluation is not None
        assert run.evaluation.pool is run.collector.pool


def test_an_evaluation_draws_random_numbers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    agenerate = TransformersPolicy.agenerate

    async def watched(self: Any, prompt: Any, sampling: Any) -> Any:
        asked.append(sampling["seed"])
        return await agenerate(self, prompt, sampling)

    monkeypatch.setattr(TransformersPolicy, "agenerate", watched)
    held_out = {"datasets": [{"name": "arithmetic", "count": 12, "largest": 4}]}
    train(a_plan(tmp_path, 1, evaluation=held_out, conventions__evaluation_temperature=1.0))
    assert len(set(asked)) == len(asked) == 12 + 4


def test_a_dataset_that_is_held_out_and_not_there_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"datasets\[0\]: unknown .*'sums'"):
        train(a_plan(tmp_path / "run", evaluation={"datasets": [{"name": "sums"}]}))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    train(a_plan(tmp_path, 1))
    with pytest.raises(UserError, match="holds a run already"):
        train(a_plan(tmp_path, 1))


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        train(a_plan(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("steps", "changes", "told"),
    [
        (4, {"optimizer__learning_rate": 1.0}, "plan with other optimizer"),
        (1, {}, "the run is at step 2, beyond run.steps 1: resume with --set run.steps=N"),
    ],
    ids=["other optimizer", "fewer steps"],
)
def test_a_refused_resume_says_why_and_leaves_the_folder_as_it_was(
    tmp_path: Path, steps: int, changes: dict[str, Any], told: str
) -> None:
    train(a_plan(tmp_path, 3, run__checkpoint_every=2))
    (tmp_path / "checkpoints/step-000003.pt").unlink(missing_ok=True)  # as if the run had been killed before its end
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=told):
        train(a_plan(tmp_path, steps, run__checkpoint_every=2, **changes), resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(log_of(tmp_path)) == 3


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(tmp_path: Path) -> None:
    train(a_plan(tmp_path, 2, run__checkpoint_every=2))
    before = (tmp_path / "checkpoints/step-000002.pt").read_bytes()
    with limited_file_size(len(before) // 2), pytest.raises(CheckpointError, match=r"step-000002\.pt, is intact"):
        train(a_plan(tmp_path, 4, run__checkpoint_every=2), resume=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002.pt"]
    assert (tmp_path / "checkpoints/step-000002.pt").read_bytes() == before


class limited_file_size:
    """The kernel refuses files above a size, as a full disk does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        import resource
        import signal

        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        import resource
        import signal

        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.handler)


def audit_of(plan: Plan) -> Audit:
    return Audit(plan.conventions, every=1, on_finding="log", max_staleness=plan.schedule.versions_ahead)


@pytest.mark.parametrize(
    "name", ["several updates per step", "adapters and a reference model", "a critic, beside adapters"]
)
def test_the_audit_of_a_run_finds_nothing_and_changes_no_number(tmp_path: Path, name: str) -> None:
    changes = SETTINGS[name] | {"run__checkpoint_every": 4, "roles": PARTIAL}
    plan = a_plan(tmp_path / "audited", 4, **changes)
    audit = audit_of(plan)
    train(plan, audit=audit)
    train(a_plan(tmp_path / "alone", 4, **changes))
    assert list(audit.findings) == []
    assert audit.audited == audit.updates >= 4
    audited = [
        {name: value for name, value in line.items() if not name.startswith("canary/")}
        for line in log_of(tmp_path / "audited")
    ]
    assert audited == log_of(tmp_path / "alone")
    saved = [
        torch.load(tmp_path / run / "checkpoints/step-000004.pt", weights_only=True)["model"]
        for run in ("audited", "alone")
    ]
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"conventions__advantage_scale": "batch", "schedule__rows_per_update": 8, "schedule__max_staleness": 1},
        {"conventions__mask_truncated": True, "sampling__max_new_tokens": 1},
    ],
    ids=["parts of a batch that scales as a whole", "only truncated completions"],
)
def test_the_audit_has_no_finding_and_the_run_ends_well(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = a_plan(tmp_path, 3, **changes)
    audit = audit_of(plan)
    train(plan, audit=audit)
    assert len(log_of(tmp_path)) == 3
    assert list(audit.findings) == []


def test_a_resumed_run_goes_on_with_the_evidence_of_its_audit(tmp_path: Path) -> None:
    audits = [audit_of(a_plan(tmp_path)) for _ in range(2)]
    for audit, steps in zip(audits, (1, 2), strict=True):
        train(a_plan(tmp_path, steps, run__checkpoint_every=1), resume=steps > 1, audit=audit)
    assert [(audit.audited, audit.updates) for audit in audits] == [(1, 1), (2, 2)]


def test_the_audit_of_a_run_finds_what_its_loss_does_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = trainer.policy_loss

    def halved(*arguments: Any) -> Any:
        output = right(*arguments)
        output.loss = output.loss / 2
        return output

    monkeypatch.setattr(trainer, "policy_loss", halved)
    plan = a_plan(tmp_path, 2, roles=PARTIAL)
    audit = audit_of(plan)
    train(plan, audit=audit)
    assert "gradient.scale: the update is 0.5 times the declared one" in str(audit.findings[0])
    assert log_of(tmp_path)[-1]["canary/findings"] == len(audit.findings)
