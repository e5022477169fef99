"""GRPO on a language model small enough to train while you watch."""
