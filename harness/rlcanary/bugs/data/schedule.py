"""Bugs in the batch schedule."""

from rlcanary.bugs.museum import Bug


class DividedByAllRanks(Bug):
    id = "verl.divided-by-all-ranks"
    source = "verl 5b90cd7dd, #125, survey V09; open-instruct 1fe6153dd, #1542, survey I09"
    effect = "under sequence parallelism updates are too small by the number of ranks per sequence"

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        return super().accumulation_steps(batch_size, micro_batch_size, n_ranks, 1)


class DivisionsInTheWrongOrder(Bug):
    id = "openrlhf.divided-before-multiplied"
    source = "OpenRLHF 43303086, #577, survey O12"
    effect = "integer division comes before multiplication: 4 steps instead of 6, 0 instead of 2"

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        super().accumulation_steps(batch_size, micro_batch_size, n_ranks, sequence_parallel)
        return batch_size // micro_batch_size // n_ranks * sequence_parallel


class MicroBatchSizeNotForwarded(Bug):
    id = "openrlhf.micro-batch-size-not-forwarded"
    source = "OpenRLHF 8990327a, #982, survey O13"
    effect = "the trainer's default micro-batch of 8 multiplies the batch size"

    def accumulation_steps(
        self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int, trainers_own: int = 8
    ) -> int:
        steps = super().accumulation_steps(batch_size, micro_batch_size, n_ranks, sequence_parallel)
        # Together the two sizes give this many micro-batches of the configured size.
        return steps * trainers_own // micro_batch_size
