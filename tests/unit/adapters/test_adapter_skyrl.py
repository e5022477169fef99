import copy
from types import SimpleNamespace

import pytest
import torch

from rlcanary.adapters import NotProvided, load_adapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds.conversations import talk, trained_runs
from rlcanary.checks.worlds.scripted_engine import engine_of, groups_of, items_of, sampling_of, scripted_items
from rlcanary.contract.batch import Completion, Group, PolicyBatch
from rlcanary.contract.records.credit import CreditBatch
from rlcanary.errors import UserError
from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_llama

CHECKS = {check.id: check for check in all_checks()}


@pytest.fixture(scope="module")
def skyrl():
    pytest.importorskip("skyrl")
    return load_adapter("skyrl")


def statuses(adapter, *ids):
    return {check_id: run_check(CHECKS[check_id], adapter, "skyrl").status for check_id in ids}


def test_the_trainers_step_descends_the_declared_gradient(skyrl):
    ids = ("step.off_policy_gradient", "step.every_parameter_moves", "rl_step.declared_gradients", "split.ranks_agree")
    assert statuses(skyrl, *ids) == dict.fromkeys(ids, "pass") | {"split.ranks_agree": "fail"}


def test_the_reference_scores_at_temperature_1_whatever_the_policy_does(skyrl):
    assert statuses(skyrl, "step.declared_gradient") == {"step.declared_gradient": "fail"}


def test_batches_end_together_and_have_the_tokens_as_sampled(skyrl):
    group = Group([5, 6], [Completion([7, 0, 2], [-1.0, -2.0, -3.0]), Completion([8], [-4.0])], [1.0, 0.5])
    batch = skyrl.make_batch([group], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 0, 2], [0, 0, 5, 6, 8]]
    assert batch.completion_mask.tolist() == [[True] * 3, [False, False, True]]
    assert batch.completion_starts.tolist() == [2, 4]


def test_the_collation_of_commits_behind_the_release_takes_the_id_of_the_padding(skyrl, monkeypatch):
    from skyrl.train.dataset import preprocess

    released = preprocess.convert_prompts_responses_to_batch_tensors

    def later(pad_token_id, **rows):
        return released(SimpleNamespace(pad_token_id=int(pad_token_id)), **rows)

    monkeypatch.setattr(preprocess, released.__name__, later)
    group = Group([5, 6], [Completion([7, 0, 2], [-1.0, -2.0, -3.0]), Completion([8], [-4.0])], [1.0, 0.5])
    assert skyrl.make_batch([group], 3).input_ids.tolist() == [[5, 6, 7, 0, 2], [3, 3, 5, 6, 8]]


def test_advantages_over_tokens_of_tools_are_whitened_with_them(skyrl):
    from rlcanary.adapters.skyrl.adapter import SkyrlAdapter

    returns = SkyrlAdapter({"advantage_estimator": "reinforce++"})
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[True, False, False, True], [True, True, True, True]]),
        group_ids=torch.tensor([0, 1]),
    )
    trained = returns.token_advantages(batch).advantages[batch.mask]
    assert abs(float(trained.mean())) > 0.1


def test_an_update_leaves_the_settings_of_the_adapter_as_they_are():
    from rlcanary.adapters.skyrl.adapter import SkyrlAdapter

    adapter = SkyrlAdapter({"update_epochs_per_batch": 3})
    before = repr(adapter.config)
    group = Group([5, 6], [Completion([7, 2], [-1.0, -2.0]), Completion([8], [-4.0])], [1.0, 0.5])
    batch = adapter.make_batch([group], 0)
    model = tiny_llama()
    adapter.train_step(adapter.new_state(model, copy.deepcopy(model), 1e-3), batch)
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]])
    adapter.policy_loss(
        PolicyBatch(
            logprobs.clone().requires_grad_(),
            logprobs,
            torch.ones(2),
            torch.ones(2, 2, dtype=torch.bool),
            ref_logprobs=logprobs,
        )
    )
    assert repr(adapter.config) == before
    assert adapter.conventions.epochs_per_rollout == 3


def test_rewards_of_tokens_are_masked_as_skyrls_kl_in_the_reward_is(skyrl, monkeypatch):
    from skyrl.train.trainer import RayPPOTrainer

    given, estimate = [], RayPPOTrainer.compute_advantages_and_returns
    monkeypatch.setattr(
        RayPPOTrainer, "compute_advantages_and_returns", lambda self, data: given.append(data) or estimate(self, data)
    )
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[True, False, True, False], [True, True, True, True]]),
        group_ids=torch.tensor([0, 0]),
        token_rewards=torch.tensor([[0.25, -5.0, 0.0, -5.0], [0.5, 0.0, 0.0, 0.5]]),
        values=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]),
    )
    skyrl.token_advantages(batch)
    # Rows end together, with their padding in front; the critic's values are handed on as they are.
    assert given[0]["rewards"].tolist() == [[0.0, 0.25, 0.0, 1.0], [0.5, 0.0, 0.0, 0.5]]
    assert given[0]["response_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert torch.equal(given[0]["values"], torch.tensor([[0.4, 0.1, 0.2, 0.3], [0.5, 0.6, 0.7, 0.8]]))


def test_a_conversation_is_one_row_whose_replies_are_not_trained(skyrl):
    (episode,) = talk(skyrl, [2]).flat
    (row,) = episode.rows
    texts = [tiny_chat_tokenizer().decode(run.ids, skip_special_tokens=True) for run in trained_runs(episode)]
    assert texts == ["hello 0 ", "hello 1 "]
    assert not all(row.completion.sampled)
    assert episode.reward == 0.625


def test_a_rollout_has_the_completions_and_rewards_of_each_item(skyrl):
    scripted = scripted_items(3, 2)
    got = skyrl.rollout(engine_of(scripted), items_of(scripted), sampling_of(n=2))
    # The completions of a group come in the order of their requests, which the engine answers in any order.
    assert [rewarded(group) for group in got] == [rewarded(group) for group in groups_of(scripted)]


def rewarded(group):
    return {tuple(each.token_ids): reward for each, reward in zip(group.completions, group.rewards, strict=True)}


def test_a_setting_that_the_conventions_cannot_express_is_refused(skyrl):
    from rlcanary.adapters.skyrl.adapter import SkyrlAdapter

    with pytest.raises(UserError, match="policy_loss_type='kl_cov'"):
        _ = SkyrlAdapter({"policy_loss_type": "kl_cov"}).conventions
    with pytest.raises(NotProvided):
        skyrl.configured(kl_estimator="k1")
