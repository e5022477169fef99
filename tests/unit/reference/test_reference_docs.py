"""The page on the reference: its examples run and its table names what exists."""

import re
from pathlib import Path

import pytest
import torch

from rlcanary import reference
from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import completion_logprobs, make_batch
from rlcanary.tiny_models import tiny_llama

PAGE = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
FIRST, FUSED = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
GROUPS = [Group([5, 6], [Completion([7, 2], [-1.0, -2.0]), Completion([8, 9, 2], [-3.0, -1.0, -0.5])], [1.0, 0.0])]


def test_the_first_example_runs(capsys):
    model = tiny_llama()
    exec(FIRST, {"groups": GROUPS, "model": model})
    assert "clip_fraction" in capsys.readouterr().out
    assert model.lm_head.weight.grad.any()


def test_the_example_of_the_fused_head_scores_what_the_model_scores():
    model = tiny_llama()
    batch, _ = make_batch(GROUPS, 0)
    hidden = model.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).last_hidden_state
    places = (batch.completion_starts.unsqueeze(1) - 1 + torch.arange(3)).clamp(max=hidden.shape[1] - 1)
    names = {"batch": batch, "model": model, "temperature": 0.7}
    names["hidden"] = hidden[torch.arange(2).unsqueeze(1), places]
    exec(FUSED, names)
    expected = completion_logprobs(model, batch, 0.7)[batch.completion_mask]
    assert names["logprobs"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_table_names_every_public_function():
    table = PAGE[PAGE.index("| Function") : PAGE.index("Choices are declared")]
    named = set(re.findall(r"`(\w+)", table))
    assert named <= set(reference.__all__)
    of_this_page = {
        name
        for name in reference.__all__
        if getattr(reference, name).__module__.rsplit(".", 1)[1]
        in ("advantages", "batching", "filters", "fused", "kl", "logprobs", "losses", "masks")
    }
    assert of_this_page - named <= {"BatchStats", "MessageTokens", "completion_scores", "packed_logprobs"}
