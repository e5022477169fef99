from dataclasses import replace

import pytest
import torch

from rlcanary.adapters import NotProvided, load_adapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.batch import Completion, Group, PolicyBatch
from rlcanary.errors import UserError
from rlcanary.reference import make_batch
from rlcanary.tiny_models import tiny_llama

CHECKS = {check.id: check for check in all_checks()}


@pytest.fixture(scope="module")
def torchrl():
    pytest.importorskip("torchrl")
    return load_adapter("torchrl")


def status(adapter, check_id):
    return run_check(CHECKS[check_id], adapter, "torchrl").status


def test_accumulation_holds_for_means_over_sequences_and_is_found_wrong_for_means_over_tokens(torchrl):
    batch = PolicyBatch(
        logprobs=torch.tensor([[-1.0, -2.0], [-2.0, -1.0]], requires_grad=True),
        old_logprobs=torch.tensor([[-1.1, -2.0], [-2.1, -1.0]]),
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.tensor([[True, True], [True, False]]),
        entropy=torch.ones(2, 2),
    )
    by_sequence = torchrl.configured(aggregation="sequence_mean")
    assert torch.allclose(by_sequence.accumulated_loss(batch, 2).loss, by_sequence.policy_loss(batch).loss)
    assert status(torchrl, "split.micro_batches") == "fail"


def test_a_step_without_a_kl_term_descends_the_declared_gradient_at_the_scheduled_rate(torchrl):
    ids = ("step.off_policy_gradient", "step.learning_rate_schedule", "step.every_parameter_moves")
    assert {check_id: status(torchrl, check_id) for check_id in ids} == dict.fromkeys(ids, "pass")


@pytest.mark.parametrize(
    ("changes", "check_id"),
    [
        ({}, "forward.packing"),
        ({}, "forward.temperature"),
        ({}, "mask.pad_equals_eos"),
        ({}, "loss.padding_amount"),
        ({}, "kl.pulls_towards_reference"),
        ({"objective": "cispo"}, "loss.declared_gradient"),
    ],
    ids=str,
)
def test_what_torchrl_gets_wrong_is_found(torchrl, changes, check_id):
    assert status(torchrl.configured(**changes), check_id) == "fail"


def test_padded_forward_passes_score_each_completion_as_if_alone(torchrl):
    ids = ("forward.scores_each_token_at_its_place", "forward.padding", "forward.garbage_in_padding")
    assert {check_id: status(torchrl, check_id) for check_id in ids} == dict.fromkeys(ids, "pass")


def test_sampling_keeps_the_order_of_prompts_and_draws_from_the_state_of_the_process(torchrl):
    engine = torchrl.new_engine(tiny_llama())
    sampling = {"n": 2, "max_new_tokens": 3, "eos_token_ids": (2,)}
    torch.manual_seed(7)
    groups = torchrl.generate(engine, [[5, 6, 7], [8, 9]], sampling)
    assert [len(group) for group in groups] == [2, 2]
    torch.manual_seed(7)
    assert groups == torchrl.generate(engine, [[5, 6, 7], [8, 9]], sampling)
    (one,) = torchrl.generate(engine, [[8, 9]], {**sampling, "temperature": 0.0, "n": 1})
    ids = torch.tensor([[8, 9, *one[0].token_ids]])
    scores = engine.model(ids).logits[0, 1:-1].log_softmax(dim=-1)
    assert one[0].token_ids == scores.argmax(dim=-1).tolist()
    expected = scores.gather(1, ids[0, 2:, None]).squeeze(1)
    assert torch.allclose(torch.tensor(one[0].logprobs)[1:], expected[1:], atol=1e-4)


def test_the_logprob_of_the_first_sampled_token_is_found_missing(torchrl):
    assert status(torchrl, "parity.logprobs") == "fail"
    (one,) = torchrl.generate(torchrl.new_engine(tiny_llama()), [[8, 9]], {"max_new_tokens": 3})
    assert one[0].logprobs[0] == 0


def test_seeds_of_requests_are_not_provided_which_torchrl_has_none_of(torchrl):
    assert status(torchrl, "parity.seed") == "not-provided"


def test_a_group_of_one_has_no_advantage_that_is_a_number(torchrl):
    assert torchrl.advantages(torch.tensor([0.7, 0.3]), torch.tensor([0, 1])).isnan().all()


def test_the_filter_is_declined_until_its_bounds_are_set(torchrl):
    from rlcanary.adapters.torchrl.adapter import TorchrlAdapter

    with pytest.raises(NotProvided, match="keep_return_bounds is not set"):
        torchrl.keep_group(torch.tensor([1.0, 0.0]))
    bounded = TorchrlAdapter(advantage={"trajectory_return": "sum", "keep_return_bounds": (0.0, 1.0)})
    assert bounded.keep_group(torch.tensor([1.0, 0.0]))
    assert not bounded.keep_group(torch.tensor([1.0, 1.0]))
    with pytest.raises(NotProvided, match="rewards of 0 and 1"):
        bounded.keep_group(torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize("loss", [{"aggregation": "none"}, {"kl_mask_threshold": 0.1}])
def test_settings_without_words_in_the_conventions_are_refused(torchrl, loss):
    from rlcanary.adapters.torchrl.adapter import TorchrlAdapter

    with pytest.raises(UserError):
        TorchrlAdapter(loss=loss)


def test_calls_print_nothing(torchrl, capfd):
    status(torchrl, "forward.padding")
    torchrl.advantages(torch.tensor([0.7]), torch.tensor([0]))
    assert capfd.readouterr() == ("", "")


def test_tokens_of_tools_are_not_trained_whatever_their_logprobs_are(torchrl):
    groups = [Group([5, 6], [Completion([8, 9, 2], sampled=[True, False, True]), Completion([10, 11])], [1.0, 0.0])]

    def weights_after_a_step(logprob_of_a_tool):
        model = tiny_llama()
        batch, _ = make_batch(groups, pad_token_id=0)
        old_logprobs = torch.full(batch.completion_mask.shape, -2.0)
        old_logprobs[~batch.completion_mask] = logprob_of_a_tool
        torchrl.train_step(torchrl.new_state(model, None, 0.1), replace(batch, old_logprobs=old_logprobs))
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights_after_a_step(-1.0), weights_after_a_step(torch.nan))
