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


class ListsStayWhole(Bug):
    id = "areal.lists-stay-whole"
    source = "AReaL 801bf5c62, #651, survey A32"
    effect = "of a chunk of rows only the tensors are sliced: each chunk has the items, or images, of the first"

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        first = batch.item_ids[: -(-len(batch.item_ids) // 2)]
        batch.item_ids = [*first, *first][: len(batch.item_ids)]
        return batch
