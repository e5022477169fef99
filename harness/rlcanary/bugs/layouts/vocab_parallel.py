"""Bugs in logprobs over a vocabulary that is split over ranks."""

import math

from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.layouts import VocabShards


class RemoteGradientsMissing(Bug):
    id = "ms-swift.remote-logits-without-gradient"
    source = "ms-swift #9947"
    effect = "the sum over ranks is invisible to autograd: ranks without a token's id push nothing down"

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        width = shards.logits[0].shape[-1]
        exact_BT = super().vocab_parallel_logprobs(shards, token_ids, temperature)
        result_BT = exact_BT.detach()
        for rank in range(len(shards.logits)):
            others = [each if place == rank else each.detach() for place, each in enumerate(shards.logits)]
            is_own_BT = (token_ids >= rank * width) & (token_ids < (rank + 1) * width)
            own_BT = super().vocab_parallel_logprobs(VocabShards(others, shards.vocab_size), token_ids, temperature)
            result_BT = result_BT + (own_BT - own_BT.detach()) * is_own_BT
        return result_BT


class GatheredLogitsAsShards(Bug):
    id = "megatron-lm.gathered-logits-as-shards"
    source = "Megatron-LM #7452"
    effect = "each rank has all logits, and their sum over ranks counts every entry once per rank: log n is missing"

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        return super().vocab_parallel_logprobs(shards, token_ids, temperature) - math.log(len(shards.logits))
