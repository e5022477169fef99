"""Evaluation of the results of checks: causes, groups, coverage, expected failures and the reports."""
