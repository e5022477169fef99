"""One module per subcommand of `rlcanary`, in a folder per section of its help: options and printing only."""

# The folders in the order of the help, and the headings of their sections.
SECTIONS = {
    "checks": "Checks",
    "training": "Training runs",
    "testing": "Tests",
    "metrics": "Metrics",
    "jobs": "Commits and jobs",
}
