"""Run the `rlcanary` command as `python -m rlcanary`."""

from rlcanary.cli import main

main()
