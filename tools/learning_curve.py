"""Draw the rewards of runs of `rlcanary train` as an SVG: `tools/learning_curve.py PICTURE RUN...`.

One run is drawn step by step below its moving average. Of several runs only the averages are drawn, in one color for all
whose folders are named alike up to the last hyphen, as `vllm-500` and `vllm-501`.
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 15, 35, 45
SMOOTHING = 9
COLORS = ("#08519c", "#d95f02", "#1b7837", "#7b3294")


def polyline(values: list[float], steps: int, style: str) -> str:
    """Draw a curve of values from 0 to 1 on an axis of so many steps."""
    across = (WIDTH - LEFT - RIGHT) / steps
    down = HEIGHT - TOP - BOTTOM
    points = " ".join(
        f"{LEFT + index * across:.1f},{TOP + (1 - value) * down:.1f}" for index, value in enumerate(values)
    )
    return f'<polyline points="{points}" fill="none" {style}/>'


def smoothed(values: list[float]) -> list[float]:
    """Compute moving averages. The windows are cut off at the ends."""
    half = SMOOTHING // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def ticks(steps: int, most: int = 8) -> range:
    """Choose round numbers from 0 to at most `steps`."""
    spacings = (base * 10**power for power in range(9) for base in (1, 2, 5))
    return range(0, steps + 1, next(spacing for spacing in spacings if steps // spacing < most))


def frame(steps: int, inside: list[str]) -> str:
    """Draw the axes of rewards over steps, and in them what is given."""
    down, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - tick) * (down - TOP)
        lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for step in ticks(steps):
        x = LEFT + step / steps * (right - LEFT)
        lines.append(f'<text x="{x:.1f}" y="{down + 18}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return "\n".join([*lines, *inside, "</svg>"]) + "\n"


def draw(records: list[dict[str, float]]) -> str:
    """Draw the records of a run's metrics.jsonl as an SVG."""
    rewards = [record["reward"] for record in records]
    seconds = sum(value for record in records for name, value in record.items() if name.startswith("seconds/"))
    above = next((index + 1 for index, value in enumerate(smoothed(rewards)) if value >= 0.9), None)
    title = f"Reward over {len(rewards)} steps, {seconds / 60:.1f} minutes on a CPU"
    if above:
        title += f"; 0.9 at step {above}"
    inside = [
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        polyline(rewards, len(rewards), 'stroke="#9ecae1"'),
        polyline(smoothed(rewards), len(rewards), 'stroke="#08519c" stroke-width="2"'),
    ]
    return frame(len(rewards), inside)


def draw_together(curves: list[tuple[str, list[float]]]) -> str:
    """Draw the smoothed rewards of several runs, named, in a color for each name."""
    steps = max(len(rewards) for _, rewards in curves)
    names = list(dict.fromkeys(name for name, _ in curves))
    if len(names) > len(COLORS):
        raise SystemExit(f"at most {len(COLORS)} kinds of runs can be told apart: {', '.join(names)}")
    colors = dict(zip(names, COLORS, strict=False))
    words = [f'<tspan fill="{colors[name]}" font-weight="bold">{name}</tspan>' for name in names]
    inside = [f'<text x="{LEFT}" y="20" font-size="14">Reward over the steps: {", ".join(words)}</text>']
    inside += [
        polyline(smoothed(rewards), steps, f'stroke="{colors[name]}" stroke-width="1.2"') for name, rewards in curves
    ]
    return frame(steps, inside)


if __name__ == "__main__":
    picture, *runs = map(Path, sys.argv[1:])
    found = {run: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs}
    if len(found) == 1:
        picture.write_text(draw(*found.values()))
    else:
        picture.write_text(
            draw_together([(run.name.rpartition("-")[0], [each["reward"] for each in of]) for run, of in found.items()])
        )
