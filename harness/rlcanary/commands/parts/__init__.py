"""Shared options of several subcommands, and the subcommands of `rlcanary bisect`."""
