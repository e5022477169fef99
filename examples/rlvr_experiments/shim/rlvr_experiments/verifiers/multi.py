"""The verifier that each problem names."""

from rlvr_experiments.verifiers import Judged
from rlvr_experiments.verifiers.ifeval import IFEvalVerifier
from rlvr_experiments.verifiers.math import MathVerifier


class MultiVerifier(Judged):
    """Asks the verifier of each problem's type."""

    def __init__(self, math_timeout=5.0, math_max_workers=4):
        self._verifiers = {"math": MathVerifier(math_timeout, math_max_workers), "ifeval": IFEvalVerifier()}

    def judge(self, problem, completion):
        if "verifier_type" not in problem:
            raise ValueError(f"a problem must have 'verifier_type' key: {problem}")
        if problem["verifier_type"] not in self._verifiers:
            raise ValueError(f"Unknown verifier_type {problem['verifier_type']!r}")
        return self._verifiers[problem["verifier_type"]].judge(problem, completion)
