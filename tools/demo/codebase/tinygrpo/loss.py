"""Log-probabilities, the mask of what is trained, and the clipped loss."""

import torch


def token_logprobs(logits, token_ids, temperature=1.0):
    """[B, T]: the log-probability of each token under the distribution that it was sampled from."""
    return (logits.float() / temperature).log_softmax(dim=-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def completion_mask(completion_ids, eos_token_ids):
    """[B, T]: true up to and including the first end-of-sequence token of each row."""
    is_eos = torch.isin(completion_ids, torch.tensor(list(eos_token_ids)))
    return is_eos.cumsum(dim=1) - is_eos.long() == 0


def kl(logprobs, ref_logprobs):
    """[B, T]: the estimate of KL(policy || reference) that is never negative (Schulman's k3)."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.expm1() - log_ratio


def policy_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_eps=0.2, beta=0.0):
    """The clipped surrogate plus beta times the KL, averaged over the tokens of the batch; and what to log of it."""

    def token_mean(values):
        return (values * mask).sum() / mask.sum().clamp(min=1)

    logprobs, old_logprobs, ref_logprobs = (x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs))
    ratio = (logprobs - old_logprobs).exp()
    advantages = advantages.unsqueeze(1)
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    mean_kl = token_mean(kl(logprobs, ref_logprobs))
    loss = beta * mean_kl - token_mean(surrogate)
    return loss, {"loss": loss.item(), "kl": mean_kl.item()}
