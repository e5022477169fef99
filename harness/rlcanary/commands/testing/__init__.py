"""Look at the tests of a project."""
