"""Record the measurements of a test run as they happen."""
