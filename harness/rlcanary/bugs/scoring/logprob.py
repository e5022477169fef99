"""Bugs in logprobs and entropies."""

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug


class TemperatureMissing(Bug):
    id = "trl.scored-without-temperature"
    source = "TRL 04f659737, #3029, survey T06"
    effect = "the trainer scores at temperature 1, the sampler uses another: up to 3.4 nats apart"

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return reference.token_logprobs(logits, token_ids, 1.0)


class NotShifted(Bug):
    id = "prime-rl.logits-not-shifted"
    source = "prime-rl 1eba666e7, survey P02"
    effect = "each token is scored by the logits of its neighbour"

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return reference.token_logprobs(logits.roll(-1, dims=1), token_ids, temperature)


class TemperatureInPlace(Bug):
    id = "openrlhf.temperature-in-place"
    source = "OpenRLHF models/utils.py, measured"
    effect = "the caller's logits are divided in place; a second use divides again"

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            logits.div_(temperature)
        return reference.token_logprobs(logits, token_ids, 1.0)


class EntropyOfZeros(Bug):
    id = "rlvr.entropy-of-zeros"
    source = "rlvr-experiments ops.py, measured"
    effect = "the logged entropy is 0 for every policy"

    def entropy(self, logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape[:-1])


class LogitsKeptInBfloat16(Bug):
    id = "prime-rl.bfloat16-logits"
    source = "prime-rl 2222e26f5, #664, survey P19"
    effect = "logprobs have three digits: the ratio of equal policies is off by percents"

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        scores = (logits / temperature).log_softmax(dim=-1)
        return scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
