"""`pytest --canary ADAPTER` collects every conformance check as a test item."""
