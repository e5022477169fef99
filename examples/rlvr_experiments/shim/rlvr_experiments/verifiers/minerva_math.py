r"""Answers in `\boxed{}` alone: `rlcanary.reference.data.verifying` finds them, the math verifier compares them."""

from rlcanary.grpo.rewards.by_name import WARM_UP
from rlcanary.grpo.rewards.math import MathVerifier
from rlcanary.grpo.rewards.pool import VerifierPool
from rlcanary.grpo.rewards.verifier import Score
from rlcanary.grpo.rewards.workers import ChildWorker
from rlcanary.reference.data.verifying import answers_in, plain_latex
from rlvr_experiments.verifiers import Judged
from rlvr_experiments.verifiers.math import pool


def extract_boxed_strict(text):
    """Return the last answer in a box; None if there is none."""
    return (answers_in(text, "boxed") or [None])[-1]


def normalize_answer(answer):
    """Remove what does not change the meaning of an expression."""
    return plain_latex(answer or "")


def is_equiv(pred, gold, timeout=2.0):
    """Compare two expressions, which may be missing."""
    return None not in (pred, gold) and pool(1, timeout).verify(rf"\boxed{{{pred}}}", gold).value == 1.0


def _sympy_equiv_with_timeout(pred, gold, timeout):
    return is_equiv(pred, gold, timeout)


class MinervaMathVerifier(Judged):
    """Compares the last boxed expressions of a response and of a target."""

    def __init__(self):
        super().__init__(_Boxed(), "answer")


class _Boxed:
    bounds = (0.0, 1.0)

    def verify(self, response, target):
        right = extract_boxed_strict(target)
        if right is None:
            return Score(None, "bad target")
        given = extract_boxed_strict(response)
        return Score(0.0, "no answer") if given is None else pool(1, 5.0).verify(rf"\boxed{{{given}}}", right)


class SympyWorkerPool:
    """One process that compares expressions, started by the first call."""

    def __init__(self, timeout=2.0):
        self.timeout, self._pool = timeout, None

    @property
    def _started(self):
        return self._pool is not None

    @property
    def _worker(self):
        return self._pool and self._pool._workers[0]

    def check_equiv(self, pred, gold):
        """Compare two expressions; false if it takes too long."""
        if self._pool is None:
            self._pool = VerifierPool(MathVerifier, make_worker=_Worker, workers=1, warm_up=WARM_UP["math"])
        self._pool._timeout_s = self.timeout
        return self._pool.verify(rf"\boxed{{{pred}}}", gold).value == 1.0

    def shutdown(self):
        """End the process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _Worker(ChildWorker):
    def is_alive(self):
        return self._process.poll() is None
