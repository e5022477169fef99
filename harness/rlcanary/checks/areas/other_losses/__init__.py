"""Checks of the losses other than the policy's."""
