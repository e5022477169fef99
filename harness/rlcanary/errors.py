"""What rlcanary raises when the person at the keyboard can mend it."""


class UserError(Exception):
    """A mistake in what was asked: one line that says what was given, what was expected and what to do.

    The command line prints it on stderr and exits with code 2; pytest plugins turn it into `pytest.UsageError`.
    """
