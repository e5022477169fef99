"""Verifiers: those of `rlcanary.grpo.rewards`. A score without a value, which is no reward there, is their 0."""

from rlcanary.grpo.rewards.verifier import judge


class Judged:
    """The methods that their verifiers share, on a verifier of rlcanary's.

    Attributes:
        verifier: scores a response against a target.
        key: the place of the target in a problem.
    """

    def __init__(self, verifier, key):
        self.verifier, self.key = verifier, key

    def judge(self, problem, completion):
        """Score one completion of a problem, as rlcanary does."""
        return judge(self.verifier, completion, problem[self.key])

    def verify(self, response, target):
        """Score one response."""
        return self.judge({self.key: target}, response).value or 0.0

    async def verify_completions(self, problem, completions):
        """Score the completions of one problem."""
        return [self.judge(problem, completion).value or 0.0 for completion in completions]

    async def verify_batch(self, problems, completions):
        """Score one completion per problem -> scores, and milliseconds of each."""
        return (await self.verify_batch_with_timing(problems, completions))[:2]

    async def verify_batch_with_timing(self, problems, completions):
        """Score one completion per problem -> scores, milliseconds of each, and these with their beginnings."""
        scores = list(map(self.judge, problems, completions))
        spent = [1000 * score.seconds for score in scores]
        return [score.value or 0.0 for score in scores], spent, [(sum(spent[:at]), ms) for at, ms in enumerate(spent)]
