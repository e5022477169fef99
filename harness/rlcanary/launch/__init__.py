"""Launch the scripts of tests/test_suites: code snapshots, jobs, verdicts."""
