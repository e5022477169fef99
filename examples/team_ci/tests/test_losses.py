import torch
from teamrl.losses import policy_loss


def test_loss_of_a_good_token_falls_with_its_logprob():
    logprobs = torch.zeros(1, 1, requires_grad=True)
    policy_loss(logprobs, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)).backward()
    assert logprobs.grad.item() == -1
