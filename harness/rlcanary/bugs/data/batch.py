"""Bugs in collating."""

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch, Group


class PadsMaskedById(Bug):
    id = "rlvr.padding-found-by-id"
    source = "rlvr-experiments de735d8, survey H01"
    effect = "tokens whose id happens to be the padding id are not trained"

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        batch.completion_mask = batch.completion_ids != pad_token_id
        return batch
