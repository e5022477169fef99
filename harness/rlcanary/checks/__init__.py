"""The conformance suite: properties of RL training code that hold for every correct implementation."""

from rlcanary.checks.check import Check, Result, run_check
from rlcanary.checks.registry import all_checks, checks_of
from rlcanary.checks.tally import Finding

__all__ = ["Check", "Finding", "Result", "all_checks", "checks_of", "run_check"]
