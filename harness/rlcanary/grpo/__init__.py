"""Bundled GRPO trainer, built on `rlcanary.reference`: small, readable, and run for real in the tests."""
