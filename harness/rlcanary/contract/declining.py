"""The exception with which an adapter declines a capability."""


class NotProvided(Exception):
    """Raised for a capability that the adapter lacks, with the reason if there is one."""
