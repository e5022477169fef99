"""A finding leaves a bundle, from which the update is judged again: as it was, as an adapter takes it, and on fewer rows."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import rlcanary
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import DAPO, GRPO
from rlcanary.errors import UserError
from rlcanary.live import Audit, bundle, replayed
from rlcanary.live.replay import judged, shrunk, taken_by

B, T = 8, 5
MASK = torch.arange(T) < torch.tensor([5, 2, 4, 5, 1, 3, 5, 2]).unsqueeze(1)
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GROUPS = torch.arange(B) // 4

WRONG = """
from rlcanary.adapters.reference import ReferenceAdapter

class Wrong(ReferenceAdapter):
    name = "wrong"

    def policy_loss(self, batch):
        output = super().policy_loss(batch)
        output.loss = 2 * output.loss
        return output
"""


ALONE = """
from rlcanary import Adapter, reference
from rlcanary.contract.presets import GRPO

class LossAlone(Adapter):
    name = "loss-alone"
    conventions = GRPO

    def policy_loss(self, batch):
        return reference.policy_loss(batch, GRPO)
"""


class Doubled(ReferenceAdapter):
    """Takes every update twice as long."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        output.loss = 2 * output.loss
        return output


class FirstTokenTwice(ReferenceAdapter):
    """Trains the first token of one row, which is the one with the smallest logprob, once more."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        if batch.logprobs[:, 0].min() < -4:
            output.loss = output.loss + batch.logprobs[:, 0].min()
        return output


def bundle_of(
    folder: str | Path, loss: Callable[[PolicyBatch], Tensor], conventions: Conventions | None = GRPO, pieces: int = 1
) -> Path:
    """Audit an update of this loss, and return the bundle that its finding leaves."""
    policy = (-3 * torch.rand(B, T, generator=torch.Generator().manual_seed(0))).requires_grad_()
    with torch.no_grad():
        policy[5, 0] = -5.0
    sampler_BT = policy.detach() + 0.01
    audit = Audit(conventions, every=1, on_finding="log", bundles=folder)
    declared = conventions or GRPO
    whole = PolicyBatch(policy, sampler_BT, reference.advantages(REWARDS, GROUPS, declared), MASK, group_ids=GROUPS)
    with audit.update(mask=MASK, rewards=REWARDS, group_ids=GROUPS, sampler_logprobs=sampler_BT) as update:
        for rows in torch.arange(B).split(B // pieces):
            piece = whole.rows(rows)
            piece.logprobs = update.watch(policy[rows], rows=rows)
            (loss(piece) / pieces).backward()
    assert update.findings
    return Path(folder) / "update-0"


def doubled(batch: PolicyBatch) -> Tensor:
    return 2 * reference.policy_loss(batch, GRPO).loss


def test_a_bundle_holds_the_update_and_what_was_found(tmp_path: Path) -> None:
    written = bundle_of(tmp_path, doubled)
    record, told = bundle.read(written)
    assert [line.partition(":")[0] for line in told] == ["gradient.scale"]
    assert [finding.invariant for finding in replayed(written)] == ["gradient.scale"]
    assert record.conventions == GRPO
    assert json.loads((written / "update.json").read_text())["record"]["update"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["update-0"]


def test_an_adapter_that_takes_the_update_as_declared_has_no_finding(tmp_path: Path) -> None:
    written = bundle_of(tmp_path, doubled)
    assert replayed(written, ReferenceAdapter(GRPO)) == []
    assert [finding.invariant for finding in replayed(written, Doubled(GRPO))] == ["gradient.scale"]


class LogsAnotherKl(ReferenceAdapter):
    """Takes updates as declared, and logs a KL that is none."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        output.metrics["kl"] = 9.0
        return output


def test_of_an_adapters_metrics_those_count_that_the_run_logs(tmp_path: Path) -> None:
    conventions = GRPO.replace(kl_coef=0.05)
    record, _ = bundle.read(bundle_of(tmp_path, doubled))
    record = replace(record, conventions=conventions, ref_logprobs=record.logprobs - 0.2)
    adapter = LogsAnotherKl(conventions)
    assert judged(taken_by(adapter, record), adapter) == []
    logs_kl = taken_by(adapter, replace(record, logged={"kl": 0.02}))
    assert [finding.invariant for finding in judged(logs_kl, adapter)] == ["logged.kl"]
    rows, _ = shrunk(logs_kl, "logged.kl", adapter)
    assert len(rows) == 1


def test_an_adapters_metrics_are_those_of_the_whole_update(tmp_path: Path) -> None:
    conventions = GRPO.replace(kl_coef=0.05)
    record, _ = bundle.read(bundle_of(tmp_path, doubled))
    given = {"ref_logprobs": record.logprobs - torch.arange(B).unsqueeze(1) / 4, "logged": {"kl": 0.02}}
    parts = list(torch.arange(B).split([1, B - 1]))
    adapter = ReferenceAdapter(conventions)
    assert judged(taken_by(adapter, replace(record, conventions=conventions, parts=parts, **given)), adapter) == []


def test_means_of_micro_batches_are_replayed_in_as_many_micro_batches(tmp_path: Path) -> None:
    written = bundle_of(tmp_path, lambda piece: reference.policy_loss(piece, DAPO).loss, DAPO, pieces=2)

    class MeanOfMeans(ReferenceAdapter):
        def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
            pieces = [batch.rows(rows) for rows in torch.arange(len(batch.mask)).tensor_split(n_micro)]
            losses = [reference.policy_loss(piece, self.conventions).loss for piece in pieces]
            return LossOutput(sum(losses) / n_micro)

    assert replayed(written, ReferenceAdapter(DAPO)) == []
    (finding,) = replayed(written, MeanOfMeans(DAPO))
    assert "the mean of the losses of 2 micro-batches" in finding.message


def test_the_update_shrinks_to_the_row_that_is_wrong(tmp_path: Path) -> None:
    record, _ = bundle.read(bundle_of(tmp_path, lambda batch: FirstTokenTwice(GRPO).policy_loss(batch).loss))
    rows, smallest = shrunk(record, "gradient.direction")
    assert rows.tolist() == [5]
    assert len(smallest.mask) == 1
    rows, _ = shrunk(taken_by(FirstTokenTwice(GRPO), record), "gradient.direction", FirstTokenTwice(GRPO))
    assert len(rows) == 2, "alone in its group the row has no advantage"
    assert 5 in rows.tolist()


def test_the_folders_of_bundles_and_of_one_may_be_texts(tmp_path: Path) -> None:
    written = bundle_of(str(tmp_path), doubled)
    assert bundle.read(str(written))[1]
    assert [finding.invariant for finding in replayed(str(written))] == ["gradient.scale"]


def test_the_folder_above_a_bundle_names_the_bundle(tmp_path: Path) -> None:
    written = bundle_of(tmp_path, doubled)
    with pytest.raises(UserError, match=f"did you mean {written}"):
        bundle.read(tmp_path)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no bundle of an update"):
        bundle.read(tmp_path)
    written = bundle_of(tmp_path, doubled)
    (written / "update.json").write_text('{"record": 3}')
    with pytest.raises(UserError, match="cannot be read by rlcanary"):
        bundle.read(written)


def test_the_command_says_it_again_and_its_exit_code_follows_the_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    written = str(bundle_of(tmp_path, doubled))
    as_taken = rlcanary("replay", written, cwd=tmp_path)
    assert as_taken.returncode == 1
    assert "the update is 2 times the declared one" in as_taken.stdout
    assert rlcanary("replay", written, "--adapter=reference", cwd=tmp_path).returncode == 0
    test = tmp_path / "tests/test_update.py"
    for _ in range(2):  # the second one takes the place of the first
        wrong = rlcanary("replay", written, "--adapter=mine", f"--write-test={test}", cwd=tmp_path)
        assert wrong.returncode == 1, wrong.stderr
        assert "tests/test_update_update-0: commit both" in wrong.stdout
    pytest_alone = [sys.executable, "-P", "-m", "pytest", "-q", str(test)]  # which puts the current folder on no path
    ran = [subprocess.run(pytest_alone, cwd=tmp_path, capture_output=True, text=True, check=False)]
    (tmp_path / "mine.py").write_text(WRONG.replace("2 * ", ""))
    ran.append(subprocess.run(pytest_alone, cwd=tmp_path, capture_output=True, text=True, check=False))
    assert [done.returncode for done in ran] == [1, 0], ran[1].stdout
    mended = rlcanary("replay", written, "--adapter=mine", "--write-test=tests/test_mended.py", cwd=tmp_path)
    assert mended.returncode == 0
    assert "tests/test_mended.py is not written" in mended.stdout
    assert sorted(path.name for path in test.parent.iterdir() if path.name != "__pycache__") == [
        "test_update.py",
        "test_update_update-0",
    ]
    assert "AssertionError: gradient.scale: the update is 2 times the declared one" in ran[0].stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "is no bundle of an update"),
        (["nowhere", "--write-test=test_update.py"], "--write-test needs --adapter"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = rlcanary("replay", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def test_samples_are_shown_as_trainer_and_sampler_score_them(tmp_path: Path) -> None:
    audit = Audit(None, every=1, on_finding="log", bundles=tmp_path)
    logprobs = torch.full((B, T), -0.5)
    audit.sampled(mask=torch.ones(B, T).bool(), logprobs=logprobs, sampler_logprobs=logprobs - 3)
    done = rlcanary("replay", "samples-0", cwd=tmp_path)
    assert done.returncode == 1
    assert "Samples 0 of a run" in done.stdout
    (first, *_) = [line.split() for line in done.stdout.splitlines() if "-3.5" in line]
    assert [each for each in first if each != "│"][1:] == ["0", "-0.5", "-3.5"]


def test_tokens_are_shown_with_the_ratio_and_the_advantage_that_the_loss_has(tmp_path: Path) -> None:
    """This run gave the sampler's logprobs, which are higher by 0.01, and the rewards 0, 0, 1 and 0 of a group."""
    done = rlcanary("replay", str(bundle_of(tmp_path, doubled)), cwd=tmp_path)
    first = next(line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line)
    assert [each.strip() for each in first[3:5]] == ["0.99", "-0.5"]


def test_an_adapter_is_not_blamed_for_what_its_loss_cannot_cause(tmp_path: Path) -> None:
    audit = Audit(GRPO, every=1, on_finding="log", bundles=tmp_path, max_staleness=1)
    policy = (-torch.rand(B, T)).requires_grad_()
    with audit.update(mask=MASK, versions=torch.zeros(B), trainer_version=5) as update:
        (update.watch(policy * 1) * MASK).sum().backward()
    assert [finding.invariant for finding in update.findings] == ["staleness.too_old"]
    done = rlcanary("replay", "update-0", "--adapter=reference", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave --adapter out" in done.stderr
    assert rlcanary("replay", "update-0", cwd=tmp_path).returncode == 1


def test_an_adapter_without_advantages_is_not_blamed_for_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    audit = Audit(GRPO, every=1, on_finding="log", bundles=tmp_path)
    audit.rollout(mask=MASK, rewards=REWARDS, group_ids=GROUPS, advantages=REWARDS)
    done = rlcanary("replay", "rollout-0", "--adapter=alone", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "it has no `advantages`; leave --adapter out" in done.stderr


def test_a_loss_that_is_taken_in_one_piece_is_told_apart_from_the_micro_batches_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    done = rlcanary("replay", str(bundle_of(tmp_path, doubled, pieces=2)), "--adapter=alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "for the 2 micro-batches of the run the adapter needs `accumulated_loss`" in " ".join(done.stdout.split())


def test_a_finding_that_one_update_cannot_show_is_not_taken_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(T, B)
    audit = Audit(None, every=1, on_finding="log", bundles=tmp_path)
    with audit.update(mask=MASK, model=model) as update:
        (update.watch(model.weight * 1) * MASK).sum().backward()
    assert [finding.invariant for finding in update.findings] == ["weights.still"]
    done = rlcanary("replay", "update-0", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "does not show weights.still again" in " ".join(done.stdout.split())


def test_a_loss_that_is_not_declared_is_not_called_right(tmp_path: Path) -> None:
    custom = GRPO.replace(objective="custom")
    bundle_of(tmp_path, lambda batch: doubled(batch) + batch.logprobs.sum(), custom)
    done = rlcanary("replay", "update-0", "--adapter=reference", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run declares none" in " ".join(done.stdout.split())


def test_the_file_of_an_adapter_is_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    written = str(bundle_of(tmp_path, doubled))
    done = rlcanary("replay", written, "--adapter=mine.py", "--write-test=tests/test_update.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (tmp_path / "tests/mine.py").write_text(WRONG.replace("2 * ", ""))
    command = [sys.executable, "-m", "pytest", "-q", "test_update.py"]
    ran = subprocess.run(command, cwd=tmp_path / "tests", capture_output=True, text=True, check=False)
    assert "the update is 2 times the declared one" in ran.stdout
