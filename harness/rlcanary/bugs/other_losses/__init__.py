"""Bugs in the losses other than the policy's."""
