"""What an audit knows of a run goes on behind a resume: evidence, findings, and which parameters are trained."""

import json

import pytest
import torch

from rlcanary.contract.presets import GRPO
from rlcanary.live import Audit
from rlcanary.live.record import Record

B, T = 4, 3
MASK = torch.ones(B, T).bool()


def record_of(update: int) -> Record:
    """Samples whose mean ratio is 1.15, which a single update does not show."""
    sampled = -torch.rand(B, T, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
    logprobs = sampled + torch.tensor([1.8, 0.5]).log().repeat_interleave(T * B // 2).view(T, B).T
    versions = torch.zeros(B, dtype=torch.long)
    return Record(
        update, None, logprobs, torch.zeros(B, T), MASK, sampler_logprobs=sampled, versions=versions, trainer_version=0
    )


def first_found(audit: Audit, start: int, end: int) -> int | None:
    """Judge updates -> the one behind which there is a finding of the ratio."""
    for update in range(start, end):
        if any(finding.invariant == "sampling.ratio" for finding in audit.judge(record_of(update))):
            return update
    return None


def resumed(audit: Audit) -> Audit:
    other = Audit(GRPO, on_finding="log")
    other.load_state_dict(json.loads(json.dumps(audit.state_dict())))
    return other


def test_evidence_is_found_at_the_same_update_as_without_the_resume() -> None:
    expected = first_found(Audit(on_finding="log"), 0, 300)
    assert expected is not None
    assert expected > 1
    half = Audit(on_finding="log")
    assert first_found(half, 0, expected // 2) is None
    assert first_found(resumed(half), expected // 2, 300) == expected


def step(audit: Audit, model: torch.nn.Linear) -> list[str]:
    with audit.update(mask=torch.ones(1, 2).bool(), model=model) as update:
        update.watch(model(torch.ones(1, 2))).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 1
    return [finding.invariant for finding in update.findings]


@pytest.mark.parametrize(("is_frozen", "found"), [(False, []), (True, ["weights.trained"])])
def test_a_parameter_that_is_no_longer_trained_behind_a_resume_is_found(is_frozen: bool, found: list[str]) -> None:
    audit, model = Audit(every=1, on_finding="log"), torch.nn.Linear(2, 2)
    assert step(audit, model) == []
    model.bias.requires_grad_(not is_frozen)
    audit = resumed(audit)
    audit.every = 1
    assert step(audit, model) == found
    assert step(audit, model) == []


def test_a_parameter_that_moved_before_a_resume_may_rest_behind_it() -> None:
    audit, model = Audit(every=1, on_finding="log"), torch.nn.Linear(2, 2)
    assert step(audit, model) == []
    weights = [each.detach().clone() for each in model.parameters()]
    audit = resumed(audit)
    audit.every = 1
    with audit.update(mask=torch.ones(1, 2).bool(), model=model) as update:
        update.watch(model(torch.ones(1, 2))).sum().backward()
    assert all(map(torch.equal, weights, model.parameters()))
    assert update.findings == []


def test_evidence_that_cannot_be_read_is_a_warning_and_changes_nothing() -> None:
    audit = Audit(on_finding="log")
    with pytest.warns(UserWarning, match="the audit of an update failed, the run is not affected"):
        audit.load_state_dict({"updates": 3})
    assert audit.updates == 0
