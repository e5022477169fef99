"""Errors that a user of rlcanary can fix."""


class UserError(Exception):
    """A user's mistake: one line with the value given, the value expected and the next step.

    The command line prints it on stderr and exits with code 2; pytest plugins turn it into `pytest.UsageError`.
    """
