"""A line chart as SVG text: x in powers of two, y from zero, names at the ends of the lines. It has its own background."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLORS = ("#0b62a8", "#c4501b", "#3d7d3a", "#7a4fa0", "#5c5c5c", "#a3812b")
LABEL_STEP = 15
"""Least distance of two names, so that they do not cover each other."""


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), x above 0 and y at least 0."""
    dashed: bool = False


def tick_step(largest: float) -> float:
    """The least of 1, 2, 5 times a power of ten of which six at most reach `largest`."""
    power = 10.0 ** math.floor(math.log10(largest / 6))
    return next(power * step for step in (1, 2, 5, 10) if power * step * 6 >= largest)


def line_chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """SVG text. There must be a point; lines without points are left out."""
    lines = [line for line in lines if line.points]
    xs = sorted({x for line in lines for x, _ in line.points})
    largest = max(y for line in lines for _, y in line.points) or 1.0
    step = tick_step(largest)
    top = step * math.ceil(largest / step)
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def x_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((math.log2(x) - low) / (high - low) if high > low else 0.5)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, "start", 'font-size="14"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name),
        _text(15, (TOP + HEIGHT - BOTTOM) / 2, y_name, "middle", f'transform="rotate(-90 15 {(TOP + HEIGHT - BOTTOM) / 2:.1f})"'),
    ]
    for number in range(round(top / step) + 1):
        y = y_at(number * step)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{number * step:g}", "end"))
    parts += [_text(x_at(x), HEIGHT - BOTTOM + 18, f"{x:g}") for x in xs]
    parts += _drawn(lines, [[(x_at(x), y_at(y)) for x, y in sorted(line.points)] for line in lines])
    return "\n".join([*parts, "</svg>", ""])


def _drawn(lines: Sequence[Line], places: Sequence[Sequence[tuple[float, float]]]) -> list[str]:
    """The lines with dots, and their names at the right, moved apart from top to bottom."""
    parts, label_y = [], -math.inf
    for index in sorted(range(len(lines)), key=lambda index: places[index][-1][1]):
        line, at, color = lines[index], places[index], COLORS[index % len(COLORS)]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in at]
        label_y = max(at[-1][1] + 4, label_y + LABEL_STEP)
        parts.append(_text(at[-1][0] + 10, label_y, line.name, "start", f'fill="{color}"'))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
