"""What the results of checks come to: causes, groups, coverage, what was expected, and the report."""
