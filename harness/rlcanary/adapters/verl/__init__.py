"""verl behind the adapter contract."""
