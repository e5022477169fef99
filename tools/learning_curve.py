"""Draw the reward of a run of `rlcanary train` as an SVG: `tools/learning_curve.py runs/arithmetic docs/arithmetic.svg`."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 15, 35, 45
SMOOTHING = 9


def points(values: list[float]) -> str:
    """Compute the points of the curve, with rewards from 0 to 1."""
    across = (WIDTH - LEFT - RIGHT) / len(values)
    down = HEIGHT - TOP - BOTTOM
    return " ".join(f"{LEFT + index * across:.1f},{TOP + (1 - value) * down:.1f}" for index, value in enumerate(values))


def smoothed(values: list[float]) -> list[float]:
    """Compute moving averages. The windows are cut off at the ends."""
    half = SMOOTHING // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def ticks(steps: int, most: int = 8) -> range:
    """Choose round numbers from 0 to at most `steps`."""
    spacings = (base * 10**power for power in range(9) for base in (1, 2, 5))
    return range(0, steps + 1, next(spacing for spacing in spacings if steps // spacing < most))


def draw(records: list[dict[str, float]]) -> str:
    """Draw the records of a run's metrics.jsonl as an SVG."""
    rewards = [record["reward"] for record in records]
    seconds = sum(value for record in records for name, value in record.items() if name.startswith("seconds/"))
    above = next((index + 1 for index, value in enumerate(smoothed(rewards)) if value >= 0.9), None)
    title = f"Reward over {len(rewards)} steps, {seconds / 60:.1f} minutes on a CPU"
    if above:
        title += f"; 0.9 at step {above}"
    down, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - tick) * (down - TOP)
        lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for step in ticks(len(rewards)):
        x = LEFT + step / len(rewards) * (right - LEFT)
        lines.append(f'<text x="{x:.1f}" y="{down + 18}" text-anchor="middle">{step}</text>')
    lines += [
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>',
        f'<polyline points="{points(rewards)}" fill="none" stroke="#9ecae1"/>',
        f'<polyline points="{points(smoothed(rewards))}" fill="none" stroke="#08519c" stroke-width="2"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run, picture = map(Path, sys.argv[1:])
    picture.write_text(draw([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]))
