"""Search commits and run jobs."""
