"""Parts of the subcommands: options that several share, longer runs, and the subcommands of `rlcanary bisect`."""
