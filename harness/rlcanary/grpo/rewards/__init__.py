"""Verifiers: they score a completion, or say why it could not be scored."""
