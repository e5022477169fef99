"""The functions that conventions may give in place of a word."""

from collections.abc import Callable
from typing import Any

from rlcanary.contract.declining import NotProvided


def own_function(piece: Any, name: str) -> Callable[..., Any] | None:
    """Return the function that a convention gives; None where it gives a word.

    Args:
        piece: the value of the convention.
        name: the name of the convention.

    Raises:
        NotProvided: the piece is "custom".
    """
    if piece == "custom":
        raise NotProvided(f"{name} is 'custom', without a function to compare with")
    return piece if callable(piece) else None
