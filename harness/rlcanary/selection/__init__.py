"""Test selection that sees into other processes: what pytest-testmon needs to know about Ray actors and subprocesses."""
