import pytest
import torch

from rlcanary.adapters import NotProvided, load_adapter
from rlcanary.checks.worlds.conversations import talk
from rlcanary.checks.worlds.scripted_engine import engine_of, groups_of, items_of, sampling_of, scripted_items
from rlcanary.contract.adapter import Item
from rlcanary.contract.records.credit import CreditBatch
from rlcanary.contract.records.preparation import Answer
from rlcanary.tiny_models import tiny_chat_tokenizer, tiny_llama


@pytest.fixture(scope="module")
def torchrl():
    pytest.importorskip("torchrl")
    return load_adapter("torchrl")


@pytest.fixture(scope="module")
def collecting(torchrl):
    pytest.importorskip("vllm")
    return torchrl


def test_a_rollout_has_the_completions_and_rewards_of_each_item(collecting):
    scripted = scripted_items(3, 2)
    got = collecting.rollout(engine_of(scripted), items_of(scripted), sampling_of(n=2))
    for group, wanted in zip(got, groups_of(scripted), strict=True):
        assert (group.item_id, list(group.prompt_ids)) == (wanted.item_id, list(wanted.prompt_ids))
        assert group.rewards == wanted.rewards
        sampled = [(each.token_ids, each.finish_reason) for each in group.completions]
        assert sampled == [(list(each.token_ids), each.finish_reason) for each in wanted.completions]


def test_an_end_at_a_stop_text_is_declined_for_a_rollout_keeps_no_finish_reason(collecting):
    scripted = scripted_items(1, 1)
    with pytest.raises(NotProvided, match="no finish reason"):
        collecting.rollout(engine_of(scripted), items_of(scripted), sampling_of(stop_sequences=("a",)))


def test_the_tools_of_a_conversation_are_torchrls_and_its_answers_keep_their_end_of_turn(collecting):
    (episode,) = talk(collecting, [2]).flat
    assert episode.turn_rewards == [0.0, 0.625]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["content"] == "hello 0 <|end|>"
    assert "<|end|><|end|>" in tiny_chat_tokenizer().decode(episode.rows[1].prompt_ids)


def test_rewards_come_through_the_parser_of_torchrl(torchrl):
    items = [Item("a", [5], {"4": 1.0}.get), Item("b", [5], {"4": -0.5}.get)]
    rewards = torchrl.score(items, ["4", "4"])
    assert rewards.tolist() == [1.0, -0.5]
    assert torchrl.score(items, ["4", "5"]).isnan().tolist() == [False, True]


def test_a_sync_brings_all_weights_and_raises_the_version(torchrl):
    engine = torchrl.new_engine(tiny_llama(0))
    torchrl.sync_weights(torchrl.new_state(tiny_llama(1), None, 1e-3), engine)
    assert engine.version == 1
    for name, value in tiny_llama(1).state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


def test_gae_sees_each_row_as_a_trajectory_of_its_trained_tokens(torchrl):
    estimator = torchrl.configured(token_credit="gae", discount=0.5, gae_lambda=0.0)
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 2.0]),
        mask=torch.tensor([[True, False, True], [True, False, False]]),
        group_ids=torch.tensor([0, 0]),
        values=torch.tensor([[0.5, 9.0, 0.25], [1.0, 9.0, 9.0]]),
    )
    credit = estimator.token_advantages(batch)
    expected = torch.tensor([[0.5 * 0.25 - 0.5, 0.0, 0.75], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(credit.advantages, expected)
    torch.testing.assert_close(credit.returns, (expected + batch.values) * batch.mask)


def test_whole_numbers_are_verified_and_other_formats_are_declined(torchrl):
    assert torchrl.verify(Answer("number", "tag", "<answer>1,234</answer>", "1234"))
    assert not torchrl.verify(Answer("number", "tag", "<answer>4321</answer>", "1234"))
    with pytest.raises(NotProvided, match="<answer> tag"):
        torchrl.verify(Answer("number", "boxed", r"\boxed{1}", "1"))


def test_a_template_without_the_mark_of_generation_is_replaced(torchrl):
    tokenizer = tiny_chat_tokenizer()
    ids, trained = torchrl.render(
        [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four", "sampled": True}], tokenizer
    )
    assert "<|im_start|>" in tokenizer.decode(ids)
    assert tokenizer.decode([token for token, flag in zip(ids, trained, strict=True) if flag]) == "four"
