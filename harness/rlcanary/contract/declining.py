"""How an adapter declines."""


class NotProvided(Exception):
    """Raised for a capability that the adapter lacks, with the reason if there is one."""
