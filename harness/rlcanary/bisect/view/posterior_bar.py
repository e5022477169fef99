"""Draw the posterior over commits as one line of text."""

from collections.abc import Sequence

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"
VISIBLE = 0.002
"""The least share of the tallest column that is drawn."""


def posterior_bar(shares: Sequence[float], width: int) -> str:
    """Draw up to `width` columns, oldest commit first. The height is the probability; the tallest column is full.

    A commit that spans two columns counts in both, in proportion.
    """
    columns = min(width, len(shares))
    below = np.concatenate([[0.0], np.cumsum(shares)])
    parts = np.diff(np.interp(np.linspace(0, len(shares), columns + 1), np.arange(len(shares) + 1), below))
    top = float(parts.max()) or 1.0
    tallest = len(BLOCKS) - 1
    return "".join(BLOCKS[0 if part < VISIBLE * top else max(1, round(part / top * tallest))] for part in parts)
