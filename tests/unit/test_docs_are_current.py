"""The generated pages and counts are those of the code as it is."""

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcanary import reference
from rlcanary.adapters import Adapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import CREDIT_PAPERS, PAPERS

ROOT = Path(__file__).parents[2]


def test_generated_pages_and_counts_are_current() -> None:
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "tools/write_docs.py")
    assert spec is not None
    assert spec.loader is not None
    write_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_docs)
    files = write_docs.generated()
    stale = [
        str(path.relative_to(ROOT)) for path, text in files.items() if not path.is_file() or path.read_text() != text
    ]
    assert stale == [], "run `make docs`"
    assert set((ROOT / "docs/checks").glob("*.md")) <= files.keys()


def test_every_algorithm_with_a_preset_is_in_the_table() -> None:
    rows = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    assert [name for name in PAPERS | CREDIT_PAPERS if f"| {name} | " not in rows] == []


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checks/loss/index.html").is_file()


SETTABLE, CONFIGURATIONS, OWN_OBJECTIVE, ON_A_GPU, UPDATE, LOSS_OF_A_MODEL, LOSS_ON_LOGITS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/adapters.md").read_text(), re.DOTALL
)


def test_example_of_an_objective_of_ones_own_compares_with_its_function() -> None:
    def my_loss(batch: PolicyBatch) -> LossOutput:
        advantages_BT = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None]
        losses_BT = -advantages_BT * (batch.logprobs - batch.old_logprobs).exp().tanh()
        return LossOutput(losses_BT[batch.mask].sum() / batch.mask.sum())

    names: dict[str, Any] = {"my_loss": my_loss}
    exec(OWN_OBJECTIVE, names)
    (declared_value,) = (each for each in all_checks() if each.id == "loss.declared_value")
    assert run_check(declared_value, names["MyAdapter"](), "example").status == "pass"
    names["gated"].__code__ = (lambda logprobs, old_logprobs, advantages, mask: -advantages * logprobs).__code__
    assert run_check(declared_value, names["MyAdapter"](), "example").status == "fail"


def test_examples_of_settings_and_configurations_are_right_code() -> None:
    def my_loss(batch: PolicyBatch, low: float, high: float) -> Any:
        declared = Conventions(aggregation="token_mean", clip_low=low, clip_high=high)
        return ReferenceAdapter(declared).policy_loss(batch).loss

    names: dict[str, Any] = {"my_loss": my_loss}
    exec(SETTABLE, names)
    (options,) = (each for each in all_checks() if each.id == "config.clip_options")
    assert run_check(options, names["MyAdapter"](), "example").status == "pass"
    exec(CONFIGURATIONS, names)
    found = names["MyAdapter"]().configurations()
    assert [(name, each.conventions.kl_coef, each.conventions.clip_high) for name, each in found.items()] == [
        ("default", 0.0, 0.2),
        ("with KL", 0.04, 0.2),
        ("clip higher", 0.0, 0.28),
    ]


def test_example_of_an_update_hands_over_what_was_sampled() -> None:
    sampled: list[tuple[Any, ...]] = []

    def update_policy(model: Any, optimizer: Any, samples: list[Any], pad_token_id: int) -> dict[str, float]:
        sampled.extend(samples)
        return {"loss": 0.0, "grad_norm": 0.0}

    names: dict[str, Any] = {"Adapter": Adapter, "MySample": lambda *parts: parts, "update_policy": update_policy}
    exec(UPDATE, names)
    state = types.SimpleNamespace(model=None, optimizer=None, scheduler=types.SimpleNamespace(step=lambda: None))
    names["MyAdapter"]().train_step(state, reference.make_batch(GROUPS, 0)[0])
    rewarded = [
        (list(group.prompt_ids), list(each.token_ids), reward)
        for group in GROUPS
        for each, reward in zip(group.completions, group.rewards, strict=True)
    ]
    assert sampled == rewarded


def test_example_of_a_loss_that_takes_a_model_gives_what_an_update_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = types.SimpleNamespace(normalized=lambda samples: [(*sample[:2], 0.0) for sample in samples])
    tokens_too_many = 0

    def update_policy(model: Any, optimizer: Any, samples: list[Any], pad_token_id: int) -> dict[str, float]:
        total, count = 0.0, sum(len(ids) for _, ids, _ in samples) + tokens_too_many
        for prompt, ids, advantage in trainer.normalized(samples):
            row_1S = torch.tensor([[*prompt, *ids]])
            logprobs_1S = model(row_1S).logits[:, :-1].log_softmax(dim=-1).gather(-1, row_1S[:, 1:, None])
            loss = -advantage * logprobs_1S.sum() / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total}

    names: dict[str, Any] = {"update_policy": update_policy, "my_trainer": trainer, "MySample": lambda *parts: parts}
    exec(LOSS_OF_A_MODEL, names)
    conventions = Conventions(objective="reinforce", aggregation="token_mean")
    monkeypatch.setattr(names["MyAdapter"], "conventions", conventions)
    declared = [each for each in all_checks() if each.id in ("loss.on_policy_sign", "loss.rows_are_separate")]
    declared += [each for each in all_checks() if each.id == "loss.declared_value"]
    assert [run_check(each, names["MyAdapter"](), "example").status for each in declared] == ["pass"] * 3
    tokens_too_many = 1
    assert run_check(declared[-1], names["MyAdapter"](), "example").status == "fail"


def test_example_of_a_gpu_is_right_code() -> None:
    right = ReferenceAdapter()
    names: dict[str, Any] = {"Adapter": Adapter, "my_loss": right.policy_loss, "my_update": right.train_step}
    exec(ON_A_GPU.replace("cuda", "cpu"), names)
    checks = [each for each in all_checks() if each.id in ("loss.on_policy_sign", "step.direction")]
    statuses = [run_check(each, names["MyAdapter"](), "example").status for each in checks]
    assert statuses == ["pass", "pass"]


def test_example_of_a_loss_on_logits_gives_these_logprobs_and_lets_gradients_through() -> None:
    names: dict[str, Any] = {}
    exec(LOSS_ON_LOGITS, names)
    logprobs_BT, scored_BT = names["logprobs_BT"], names["scored_BT"]
    assert scored_BT.tolist() == [pytest.approx([-1.0, -2.0])]
    scored_BT.sum().backward()
    assert logprobs_BT.grad.tolist() == [pytest.approx([1.0, 1.0])]
