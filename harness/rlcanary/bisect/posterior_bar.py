"""The posterior as one line of text: where the culprit may be."""

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
VISIBLE = 0.002
"""Of the tallest column; less is drawn as nothing."""


def posterior_bar(shares: Sequence[float], width: int) -> str:
    """Up to `width` columns for the commits, oldest first, each as high as the probability in it; the tallest is full."""
    columns = min(width, len(shares))
    edges = [round(column * len(shares) / columns) for column in range(columns + 1)]
    sums = [sum(shares[start:end]) for start, end in pairwise(edges)]
    top = max(sums, default=0.0) or 1.0
    tallest = len(BLOCKS) - 1
    return "".join(BLOCKS[0 if part < VISIBLE * top else max(1, round(part / top * tallest))] for part in sums)
