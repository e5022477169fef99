"""`train` on conversations: a tool is read and not trained on, several verifiers judge, the KL is in the reward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import FAMILIES, family_tokenizer
from test_grpo_ahead import require_balance
from test_grpo_train import log_of, stop_at

from rlcanary.contract.batch import CollatedBatch
from rlcanary.errors import UserError
from rlcanary.grpo import train as loop
from rlcanary.grpo.data.templates import prompt_ids
from rlcanary.grpo.plan.models import ScratchSettings, character_tokenizer, save_model, scratch_model
from rlcanary.grpo.plan.plan import Plan
from rlcanary.grpo.plan.reading import read_plan
from rlcanary.grpo.train import train
from rlcanary.reference import lengths_to_mask
from rlcanary.tiny_models import tiny_qwen2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXAMPLE = Path(__file__).parents[3] / "examples/tools.yaml"
SUMS = ["1+2=", "2+3=", "4+4="]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned by heart to compute three sums with the tool, and to answer with what it prints."""
    plan = read_plan(EXAMPLE)
    assert plan.model.scratch is not None
    tokenizer = character_tokenizer(plan.model.scratch.characters)
    model = scratch_model(ScratchSettings(plan.model.scratch.characters), seed=0)

    def ids(text: str) -> list[int]:
        return [tokenizer.eos_token_id if part == "." else tokenizer.convert_tokens_to_ids(part) for part in text]

    texts = [f"{asked}```python\nprint({asked[:-1]})\n```.{eval(asked[:-1])}{eval(asked[:-1])}." for asked in SUMS]
    rows = torch.tensor([ids(text) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        logits = model(input_ids=rows).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    folder = tmp_path_factory.mktemp("taught")
    save_model(model, tokenizer, folder)
    rows_file = [
        {"id": asked, "prompt": asked, "target": str(eval(asked[:-1])), "verifier": verifier}
        for asked, verifier in zip(SUMS, ("exact", "gsm8k", "math"), strict=True)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_file))
    return folder


def the_plan(taught: Path, folder: Path, *overrides: str) -> Plan:
    changes = [
        f"run.folder={folder}",
        "run.steps=3",
        f"model={{path: {taught}}}",
        f"data.datasets=[{{name: {taught / 'sums.jsonl'}}}]",
        "schedule.prompts_per_step=3",
        "schedule.group_size=4",
        "roles.verifier.options={gsm8k: {mode: any}}",
    ]
    return read_plan(EXAMPLE, [*changes, *overrides])


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.nightly])]
)
def test_the_example_is_trained_on_turns_and_not_on_the_replies_of_the_tool(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    trained: list[CollatedBatch] = []
    take_updates = loop.take_updates

    def watched(state: Any, batch: CollatedBatch, *settings: Any) -> list[dict[str, float]]:
        trained.append(batch)
        return take_updates(state, batch, *settings)

    monkeypatch.setattr(loop, "take_updates", watched)
    outcome = train(the_plan(taught, tmp_path / "run", f"roles.sampler.engine={engine}"))
    log = log_of(tmp_path / "run")
    # Every verifier of the three rows says that most conversations end with the right sum.
    assert log[0]["reward"] > 0.6
    assert require_balance(tmp_path / "run", outcome)["used"] == 9
    # On policy the ratio is 1 for every trained token, in both turns: what is scored is what was sampled.
    assert abs(log[0]["ratio_max"] - 1) < 1e-3
    assert abs(log[0]["ratio_min"] - 1) < 1e-3
    batch = trained[0]
    lengths = batch.attention_mask.sum(dim=1) - batch.completion_starts
    replies = lengths_to_mask(lengths, batch.completion_ids.shape[1]) & ~batch.completion_mask
    assert replies.any(dim=1).float().mean() > 0.6
    assert batch.old_logprobs is not None
    assert batch.old_logprobs[batch.completion_mask].isfinite().all()


def test_conversations_are_resumed_to_the_same_numbers_with_the_kl_in_the_reward(taught: Path, tmp_path: Path) -> None:
    # The entropy's gradient moves the policy where the rewards of a group do not differ.
    overrides = ["run.steps=2", "run.checkpoint_every=1", "conventions.entropy_coef=0.01"]
    overrides += ["conventions.kl_coef=0.1", "conventions.kl_placement=reward"]
    train(the_plan(taught, tmp_path / "whole", *overrides))
    with pytest.raises(KeyboardInterrupt):
        train(the_plan(taught, tmp_path / "stopped", *overrides), on_step=stop_at(1))
    train(the_plan(taught, tmp_path / "stopped", *overrides), resume=True)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    assert log_of(tmp_path / "whole")[1]["kl"] > 0


def test_conversations_are_sampled_ahead(taught: Path, tmp_path: Path) -> None:
    outcome = train(the_plan(taught, tmp_path / "run", "schedule.max_staleness=1"))
    assert require_balance(tmp_path / "run", outcome)["used"] == 9
    assert max(line["staleness"] for line in log_of(tmp_path / "run")) <= 1


@pytest.mark.parametrize("name", ["ChatML on <|endoftext|>", "Gemma", "Qwen3"])
def test_answers_of_a_chat_model_end_with_their_turn(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family)
    model = tiny_qwen2(vocabulary=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    asked = [prompt_ids([{"role": "user", "content": each}], tokenizer) for each in SUMS]
    rows = torch.tensor([[*each, *tokenizer.encode(f"4{family.end}", add_special_tokens=False)] for each in asked])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        logits = model(input_ids=rows).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, -2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(model, tokenizer, tmp_path / "model")
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"id": each, "prompt": each, "target": "4", "verifier": "gsm8k"}) + "\n" for each in SUMS)
    )
    for folder, environment in (("answers", "null"), ("conversations", "{max_turns: 1}")):
        changes = [
            f"run.folder={tmp_path / folder}",
            f"environment={environment}",
            f"model={{path: {tmp_path / 'model'}}}",
        ]
        changes += [
            f"data.datasets=[{{name: {tmp_path / 'sums.jsonl'}}}]",
            "roles.verifier.options={gsm8k: {mode: any}}",
        ]
        changes += ["run.steps=1", "schedule.prompts_per_step=3", "sampling.max_new_tokens=8"]
        train(read_plan(EXAMPLE, changes))
        (line,) = log_of(tmp_path / folder)
        assert line["truncated"] < 0.2
        assert line["reward"] > 0.8
        assert abs(line["ratio_mean"] - 1) < 1e-3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("environment.tools={pyton: {}}", "no tool pyton.* python"),
        ("environment.tools={python: {timout: 1}}", r"tools\.python: .*timout"),
        ("environment.tools={python: {memory_bytes: 1e9}}", r"tools\.python: memory_bytes is 1000000000\.0"),
        ("environment.tools={python: {timeout: .nan}}", r"tools\.python: limits .* positive and finite: timeout=nan"),
        ("environment.max_turns=1", "environment: max_turns=1"),
        ("data.chat_template=false", "needs data.chat_template"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_its_key(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(read_plan(EXAMPLE, [f"run.folder={tmp_path / 'run'}", override]))
    assert not (tmp_path / "run").exists()
