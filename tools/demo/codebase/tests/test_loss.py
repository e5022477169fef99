import pytest
import torch

from tinygrpo.loss import completion_mask, kl, policy_loss, token_logprobs


def test_logprobs_are_those_of_a_categorical():
    logits, ids = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = torch.distributions.Categorical(logits=logits).log_prob(ids)
    torch.testing.assert_close(token_logprobs(logits, ids), expected)


def test_mask_ends_with_the_first_eos():
    ids = torch.tensor([[5, 2, 0, 0], [5, 6, 7, 2], [5, 6, 7, 8]])
    assert completion_mask(ids, [2]).sum(dim=1).tolist() == [2, 4, 4]


def test_kl_of_a_model_with_itself_is_zero():
    logprobs = torch.randn(2, 3)
    assert kl(logprobs, logprobs).abs().max() == 0


def test_on_policy_loss_is_minus_the_mean_advantage():
    logprobs, mask = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, logprobs, logprobs, torch.tensor([1.0, 3.0]), mask)
    assert loss.item() == pytest.approx(-2.0)
