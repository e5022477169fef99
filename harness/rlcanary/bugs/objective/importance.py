"""Bugs in the correction of sampler/trainer mismatch."""

from torch import Tensor

from rlcanary.bugs.museum import Bug


class WeightsWithGradient(Bug):
    id = "verl.importance-weights-with-gradient"
    source = "verl 504696245, #4105, survey V41"
    effect = "the gradient vanishes at a logprob of -1 and changes sign below"

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        weights = super().importance_weights(trainer_logprobs, sampler_logprobs, mask)
        return weights * (trainer_logprobs - trainer_logprobs.detach()).exp()
