"""`python -m rlcanary` is the `rlcanary` command."""

from rlcanary.cli import main

main()
