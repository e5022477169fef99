from pathlib import Path

import pytest
import torch

from rlcanary import reference
from rlcanary.adapters import load_adapter
from rlcanary.adapters.verl.losses.configured import WRITTEN_FOR
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.batch import PolicyBatch
from rlcanary.errors import UserError

CHECKS = {check.id: check for check in all_checks()}


@pytest.fixture(scope="module")
def verl():
    pytest.importorskip("verl")
    return load_adapter("verl")


def status(adapter, check_id):
    return run_check(CHECKS[check_id], adapter, "verl").status


def test_padded_and_packed_forward_passes_score_each_completion_as_if_alone(verl):
    ids = [check_id for check_id in CHECKS if check_id.startswith("forward.")]
    results = {check_id: run_check(CHECKS[check_id], verl, "verl") for check_id in ids}
    red = {check_id for check_id, result in results.items() if result.status != "pass"}
    assert red == {"forward.packing"}
    # A convolution reaches past the boundaries of packed rows.
    assert all("convolution" in str(finding.fingerprint) for finding in results["forward.packing"].findings)


def test_a_step_descends_the_declared_gradient_and_logs_the_learning_rate_of_the_next(verl):
    ids = ("step.declared_gradient", "step.learning_rate_schedule", "metrics.recomputed")
    assert [status(verl, check_id) for check_id in ids] == ["pass", "pass", "fail"]
    assert "lr is" in run_check(CHECKS["metrics.recomputed"], verl, "verl").message


def test_nan_behind_the_mask_reaches_the_loss_of_sequence_means_only(verl):
    batch = PolicyBatch(
        logprobs=torch.tensor([[-1.0, float("nan")]], requires_grad=True),
        old_logprobs=torch.tensor([[-1.0, -1.0]]),
        advantages=torch.tensor([1.0]),
        mask=torch.tensor([[True, False]]),
    )
    assert verl.policy_loss(batch).loss.isfinite()
    assert verl.configured(aggregation="sequence_mean").policy_loss(batch).loss.isnan()


def test_the_clip_fraction_over_ranks_is_found_to_be_a_mean_of_means(verl):
    assert status(verl, "split.metrics_over_ranks") == "fail"


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_correction_weights_are_those_declared(verl, level, mode):
    adapter = verl.configured(importance_level=level, importance_mode=mode, importance_low=0.5, importance_high=1.2)
    trainer = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.1, -1.9, -1.5], [-1.2, -0.9, -9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    expected = reference.importance_weights(trainer, sampler, mask, adapter.conventions)
    assert torch.allclose(adapter.importance_weights(trainer, sampler, mask)[mask], expected[mask])


def test_the_reward_filter_drops_a_group_of_equal_rewards(verl, monkeypatch):
    verl.keep_group(torch.tensor([1.0, 0.0]))  # imports the buffer with a stand-in of its store
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    def strict(buffer, *, max_off_policy_threshold, **others):
        assert max_off_policy_threshold > 0  # as from verl 0.10 on
        made(buffer, max_off_policy_threshold=max_off_policy_threshold, **others)

    made = ReplayBuffer.__init__
    monkeypatch.setattr(ReplayBuffer, "__init__", strict)
    assert verl.keep_group(torch.tensor([1.0, 0.0, 0.0]))
    assert not verl.keep_group(torch.full((7,), 0.9))


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"loss_agg_mode": "token-sum"}, "this adapter knows token-mean"),
        ({"policy_loss": {"loss_mode": "gpg"}}, "knows vanilla, gspo, cispo, sapo, geo_mean"),
        ({"policy_loss": {"loss_mode": "geo_mean"}}, "conventions have one aggregation"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "the longest completion"),
    ],
)
def test_settings_without_words_in_the_conventions_are_refused(verl, actor, said):
    from rlcanary.adapters.verl.adapter import VerlAdapter

    with pytest.raises(UserError, match=said):
        VerlAdapter(actor=actor)


def test_an_update_leaves_no_process_group_no_platform_and_no_output_behind(verl, capfd):
    from verl.plugin.platform import get_platform

    before = get_platform()
    batch = PolicyBatch(
        logprobs=torch.tensor([[-1.0], [-2.0]], requires_grad=True),
        old_logprobs=torch.tensor([[-1.0], [-2.0]]),
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.ones(2, 1, dtype=torch.bool),
    )
    verl.sharded_loss(batch, 2).loss.backward()
    assert batch.logprobs.grad.tolist() == [[-0.5], [0.5]]
    assert not torch.distributed.is_initialized()
    assert get_platform() is before
    assert capfd.readouterr() == ("", "")


def test_micro_batches_by_tokens_take_the_steps_that_those_by_rows_take(verl):
    from rlcanary.adapters.verl.adapter import VerlAdapter

    by_tokens = VerlAdapter(actor={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 24})
    ids = [check_id for check_id in CHECKS if check_id.startswith("rl_step.")]
    assert [status(by_tokens, each) for each in ids] == [status(verl, each) for each in ids]
    assert status(by_tokens, "rl_step.declared_gradients") == "pass"


def test_settings_that_no_value_follows_are_found(verl):
    actor = "actor_rollout_ref.actor"
    written = {f"{actor}.grad_clip": 0.5, f"{actor}.clip_ratio": 0.1, f"{actor}.optim.lr": 3e-6}
    assert [verl.effective(written)[name] for name in written] == [1.0, 0.2, 3e-6]


def test_the_default_token_builder_leaves_out_what_stands_before_a_tools_turn(verl):
    result = run_check(CHECKS["rendering.sampled_tokens_as_they_are"], verl, "verl")
    assert "do not stand in the template's place" in result.message
    assert any("tool" in str(finding.fingerprint) for finding in result.findings)


def test_turns_are_merged_by_the_name_that_verl_010_gave_the_function(verl, monkeypatch):
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    check = CHECKS["rendering.sampled_tokens_as_they_are"]
    before = run_check(check, verl, "verl")
    monkeypatch.setattr(AgentLoopBase, "ct_merge_non_assistant_msg", AgentLoopBase.ct_merge_context_msg, raising=False)
    monkeypatch.delattr(AgentLoopBase, "ct_merge_context_msg")
    after = run_check(check, verl, "verl")
    assert (after.status, after.findings) == (before.status, before.findings)


def test_an_empty_answer_to_an_empty_reference_is_rewarded(verl):
    from rlcanary.contract.records.preparation import Answer

    assert verl.verify(Answer("math", "boxed", "\\boxed{}", ""))
    assert not verl.verify(Answer("math", "boxed", "\\boxed{}", "1"))


def test_docs_and_message_name_the_same_releases():
    docs = Path(__file__).parents[3] / "docs/adapters.md"
    assert f"{WRITTEN_FOR}," in " ".join(docs.read_text().split())
