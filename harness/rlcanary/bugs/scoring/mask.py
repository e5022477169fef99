"""Bugs in completion masks."""

from collections.abc import Sequence

from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug


class MaskByPadId(Bug):
    id = "trl.mask-by-pad-id"
    source = "TRL 707a7172e, #6357, survey T40"
    effect = "with pad = EOS the policy gets no signal to stop"

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        return completion_ids != pad_token_id


class OneEosId(Bug):
    id = "verl.only-first-eos-id"
    source = "verl 3140cc2f9, #213, survey V05"
    effect = "the padding after the second EOS id is trained"

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        return reference.completion_mask(completion_ids, eos_token_ids[:1])


class EosNotTrained(Bug):
    id = "openrlhf.eos-not-trained"
    source = "OpenRLHF 37aad73e, survey O19"
    effect = "the sampled EOS is masked out"

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        kept = reference.completion_mask(completion_ids, eos_token_ids)
        for eos in eos_token_ids:
            kept = kept & (completion_ids != eos)
        return kept
