"""A line chart of a training run with and without a bug."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 220, 40, 12, 12, 30


def chart(right: Sequence[float], wrong: Sequence[float], every: int) -> str:
    """Draw the reward without the bug, solid, and with it, dashed.

    Args:
        right: the reward at each measurement without the bug, from 0 to 1.
        wrong: likewise with it. Values that are not finite leave a gap.
        every: rounds between two measurements.
    """
    last = max(len(right), len(wrong)) - 1

    def x(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / last

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)

    def path(values: Sequence[float]) -> str:
        drawn, pen = "", "M"
        for index, value in enumerate(values):
            drawn += f"{pen}{x(index):.1f} {y(value):.1f}" if math.isfinite(value) else ""
            pen = "L" if math.isfinite(value) else "M"
        return drawn

    told = f"Reward over {last * every} rounds: {right[-1]:.2f} at the end without the bug, {wrong[-1]:.2f} with it"
    grid = "".join(
        f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y(value):.1f} y2={y(value):.1f} />"
        f"<text x={LEFT - 6} y={y(value) + 4:.1f} text-anchor=end>{value:g}</text>"
        for value in (0, 0.5, 1)
    )
    return (
        f'<svg class=curve viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{told}"><title>{told}</title>{grid}'
        f"<text x={LEFT} y={HEIGHT - 8}>round 0</text>"
        f"<text x={WIDTH - RIGHT} y={HEIGHT - 8} text-anchor=end>{last * every}</text>"
        f'<path class=right d="{path(right)}" /><path class=wrong d="{path(wrong)}" /></svg>'
        f"<p class=muted>Reward of the policy: solid without the bug, {right[-1]:.2f} at the end; dashed with it, "
        f"{wrong[-1]:.2f}.</p>"
    )
