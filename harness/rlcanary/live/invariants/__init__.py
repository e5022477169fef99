"""The invariants of an update, one module each with a function `judge` that yields what it finds wrong with a record."""

from rlcanary.live.invariants import advantages, gradient, logged, logprobs, mask, size, staleness

JUDGES = (logprobs.judge, gradient.judge, advantages.judge, mask.judge, staleness.judge, size.judge, logged.judge)
