"""Test selection that sees into other processes: it tells pytest-testmon about Ray actors and subprocesses."""
