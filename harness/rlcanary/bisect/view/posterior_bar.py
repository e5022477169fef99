"""The posterior as one line of text: where the culprit may be."""

from collections.abc import Sequence

import numpy as np

BLOCKS = " ▁▂▃▄▅▆▇█"
VISIBLE = 0.002
"""Of the tallest column; less is drawn as nothing."""


def posterior_bar(shares: Sequence[float], width: int) -> str:
    """Up to `width` columns for the commits, oldest first, each as high as the probability in it; the tallest is full.

    A commit that two columns share counts in both, by how much of it lies in each.
    """
    columns = min(width, len(shares))
    below = np.concatenate([[0.0], np.cumsum(shares)])
    parts = np.diff(np.interp(np.linspace(0, len(shares), columns + 1), np.arange(len(shares) + 1), below))
    top = float(parts.max()) or 1.0
    tallest = len(BLOCKS) - 1
    return "".join(BLOCKS[0 if part < VISIBLE * top else max(1, round(part / top * tallest))] for part in parts)
