"""The invariants of an update, one module each with a function `judge` that yields what it finds wrong with a record."""

from rlcanary.live.invariants import advantages, gradient, mask, ratio, staleness

JUDGES = (gradient.judge, advantages.judge, ratio.judge, mask.judge, staleness.judge)
