"""Bugs in which items an evaluation counts, and when it runs."""

from rlcanary.bugs.museum import Bug


class ValidationTailDropped(Bug):
    id = "areal.validation-tail-dropped"
    source = "AReaL 0405b5c30, #1100, survey A26"
    effect = "the last items of the validation set are never scored, as many as do not fill a batch on each rank"

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        each = n_items // n_ranks // batch_size * batch_size
        return super().evaluation_items(n_items, batch_size, rank, n_ranks)[:each]


class ValidationPaddedWithItems(Bug):
    id = "areal.validation-padded-with-items"
    source = "AReaL, #1096"
    effect = "items from the start of the validation set are scored twice, so that all ranks have as many"

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        padded = -(-n_items // n_ranks) * n_ranks
        return [item % n_items for item in super().evaluation_items(padded, batch_size, rank, n_ranks)]


class EvaluatedOnce(Bug):
    id = "open-instruct.evaluated-once"
    source = "open-instruct 4d8882232, #1493, survey I11"
    effect = "the data loader of evaluation is used up after the first one: all later evaluations are empty"

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        used_up = self.__dict__.setdefault("_used_up", set())
        asked = (n_items, batch_size, rank, n_ranks)
        items = [] if asked in used_up else super().evaluation_items(n_items, batch_size, rank, n_ranks)
        used_up.add(asked)
        return items


class StartNeedsTheIntervalToo(Bug):
    id = "open-instruct.start-needs-the-interval-too"
    source = "open-instruct 75c088154, #1485, survey I12"
    effect = "the evaluation before training also has to be due by the interval, which it never is: there is none"

    def evaluation_steps(self, n_steps: int, every: int, at_start: bool, at_end: bool) -> list[int]:
        # Updates are counted from 1 where the condition stands.
        at_start = at_start and every == 1
        return super().evaluation_steps(n_steps, every, at_start, at_end)
