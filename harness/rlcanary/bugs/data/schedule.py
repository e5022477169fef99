"""Bugs in the batch schedule."""

from rlcanary.bugs.museum import Bug


class DividedByAllRanks(Bug):
    id = "V09"
    source = "verl 5b90cd7dd, #125"
    effect = "under sequence parallelism updates are as many times too small as there are ranks to a sequence"

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        return super().accumulation_steps(batch_size, micro_batch_size, n_ranks, 1)


class DivisionsInTheWrongOrder(Bug):
    id = "O12"
    source = "OpenRLHF 43303086, #577"
    effect = "the remainder is lost before it is multiplied: 4 steps instead of 6, 0 instead of 2"

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        super().accumulation_steps(batch_size, micro_batch_size, n_ranks, sequence_parallel)
        return batch_size // micro_batch_size // n_ranks * sequence_parallel


class MicroBatchSizeNotForwarded(Bug):
    id = "O13"
    source = "OpenRLHF 8990327a, #982"
    effect = "the trainer's default micro-batch of 8 multiplies the batch size"

    def accumulation_steps(
        self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int, trainers_own: int = 8
    ) -> int:
        steps = super().accumulation_steps(batch_size, micro_batch_size, n_ranks, sequence_parallel)
        # Together the two sizes give this many micro-batches of the configured size.
        return steps * trainers_own // micro_batch_size
