"""The adapter contract: the adapter, its records, its conventions and the engine protocol."""
