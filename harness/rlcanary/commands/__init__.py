"""One module per subcommand of `rlcanary`: options and printing only."""
