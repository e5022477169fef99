"""What several subcommands share, and the subcommands of `rlcanary bisect`."""
