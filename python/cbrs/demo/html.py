"""The picture and the figures as one self-contained HTML page: inline SVG, no script, no link."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cbrs.demo.colours import decode_colour, prefill_colour
from cbrs.demo.timeline import Bar, PolicyRun

_WIDTH, _LEFT, _RIGHT, _TOP = 1180, 62, 8, 26
_ROW_HEIGHT, _BAR_HEIGHT, _AXIS_HEIGHT = 24, 19, 34
# Advance of a digit in the 11 px label font, and the room a label needs beside it.
_DIGIT_WIDTH, _LABEL_ROOM = 7, 4

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --muted: #59636e;
  --hole: #eceff2; --hole-line: #c3cad1; --rule: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1318; --ink: #e6edf3; --muted: #9aa5b1;
  --hole: #222a33; --hole-line: #4b5866; --rule: #2f3842; } }
body { margin: 2rem auto; max-width: 1200px; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; }
p { margin: .3rem 0; } .muted { color: var(--muted); }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted); }
svg text.label { fill: #1f2328; text-anchor: middle; pointer-events: none; }
svg text.row { text-anchor: end; } svg text.tick { text-anchor: middle; }
svg .bar { stroke: var(--paper); stroke-width: 1; } svg .bar:hover { stroke: var(--ink); }
svg .end { stroke: var(--muted); stroke-dasharray: 4 3; } svg .grid { stroke: var(--rule); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: .8rem 0;
  color: var(--muted); }
.legend svg { display: inline-block; width: 26px; height: 14px; vertical-align: -2px;
  margin-right: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .6rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; } th { color: var(--muted); font-weight: 600; }
blockquote { margin: .3rem 0 1rem; padding: .1rem 1rem; border-left: 3px solid var(--rule);
  white-space: pre-wrap; }
"""

_HATCH = (
    '<pattern id="hole" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--hole)"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="var(--hole-line)" stroke-width="1.4"/></pattern>'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and what the model said to it."""

    prompt: str
    text: str


def render_html(
    runs: Sequence[PolicyRun],
    *,
    title: str,
    subtitle: str,
    table: Sequence[Sequence[str]],
    prompts: Sequence[str],
    answers: Sequence[Answer],
) -> str:
    """The page. `table` is rows of cells, the header first; `prompts` label the bars on hover."""
    end = max(len(run.iterations) for run in runs)
    panels = "".join(
        f"<h2>{escape(run.caption)}</h2>\n{_panel(run, end, prompts)}\n" for run in runs
    )
    quotes = "".join(
        f"<p><strong>{escape(answer.prompt)}</strong></p>"
        f"<blockquote>{escape(answer.text.strip())}</blockquote>\n"
        for answer in answers
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<svg width="0" height="0" style="position:absolute"><defs>{_HATCH}</defs></svg>\n'
        f'<h1>{escape(title)}</h1>\n<p class="muted">{escape(subtitle)}</p>\n'
        f"{_legend()}\n{panels}"
        f'<h2>Figures</h2><div class="scroll">{_table(table)}</div>\n'
        f"<h2>Two of the answers</h2>\n{quotes}</body></html>\n"
    )


def _panel(run: PolicyRun, end: int, prompts: Sequence[str]) -> str:
    """One policy: a row a slot, one unit of x an iteration, `end` iterations wide."""
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    bottom = _TOP + run.max_num_seqs * _ROW_HEIGHT
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + _AXIS_HEIGHT}" role="img" '
        f'aria-label="{escape(run.caption)}">',
        f'<text class="row" x="{_LEFT - 6}" y="16">arrivals</text>',
    ]
    for row in range(run.max_num_seqs):
        y = _TOP + row * _ROW_HEIGHT
        width = len(run.iterations) * scale
        parts.append(
            f'<text class="row" x="{_LEFT - 6}" y="{y + 14}">slot {row}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width:.2f}" height="{_BAR_HEIGHT}" '
            f'fill="url(#hole)"><title>slot {row}, empty</title></rect>'
        )
    parts += [_bar(bar, scale, prompts) for bar in run.bars()]
    parts += _arrivals(run, scale, prompts)
    parts += _axis(run, end, scale, bottom)
    return "".join(parts) + "</svg>"


def _bar(bar: Bar, scale: float, prompts: Sequence[str]) -> str:
    x, y = _LEFT + bar.first * scale, _TOP + bar.row * _ROW_HEIGHT
    width = bar.length * scale
    is_prefill = bar.phase == "prefill"
    colour = prefill_colour(bar.request) if is_prefill else decode_colour(bar.request)
    label = str(bar.request + 1)
    hover = (
        f"request {label}: {prompts[bar.request]}\n{bar.phase} of {bar.num_tokens} tokens in slot "
        f"{bar.row}, iterations {bar.first + 1} to {bar.first + bar.length}"
    )
    svg = (
        f'<rect class="bar" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR_HEIGHT}" rx="2" '
        f'fill="{colour}"><title>{escape(hover)}</title></rect>'
    )
    if not is_prefill and width >= _DIGIT_WIDTH * len(label) + _LABEL_ROOM:
        svg += f'<text class="label" x="{x + width / 2:.2f}" y="{y + 14}">{label}</text>'
    return svg


def _arrivals(run: PolicyRun, scale: float, prompts: Sequence[str]) -> list[str]:
    marks = []
    for request, times in enumerate(run.requests):
        x = _LEFT + times.arrival_iteration * scale
        hover = escape(f"request {request + 1} arrives: {prompts[request]}")
        marks.append(
            f'<path d="M{x - 4:.2f} 8h8l-4 8z" fill="{prefill_colour(request)}">'
            f"<title>{hover}</title></path>"
        )
    return marks


def _axis(run: PolicyRun, end: int, scale: float, bottom: int) -> list[str]:
    x_end = _LEFT + len(run.iterations) * scale
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>',
        f'<line class="end" x1="{x_end:.2f}" x2="{x_end:.2f}" y1="4" y2="{bottom}"/>',
        f'<text class="tick" x="{(_LEFT + _WIDTH) / 2}" y="{bottom + 29}">model iteration</text>',
    ]
    step = next(step for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, end) if end / step <= 12)
    for tick in range(0, end + 1, step):
        parts.append(
            f'<text class="tick" x="{_LEFT + tick * scale:.2f}" y="{bottom + 14}">{tick}</text>'
        )
    return parts


def _legend() -> str:
    swatches = (
        (
            f'<rect width="26" height="14" rx="2" fill="{prefill_colour(0)}"/>',
            "prefill (dark tone)",
        ),
        (f'<rect width="26" height="14" rx="2" fill="{decode_colour(0)}"/>', "decode (light tone)"),
        ('<rect width="26" height="14" fill="url(#hole)"/>', "empty slot"),
        (f'<path d="M8 2h10l-5 10z" fill="{prefill_colour(0)}"/>', "request arrives"),
    )
    items = "".join(
        f'<span><svg viewBox="0 0 26 14">{swatch}</svg>{text}</span>' for swatch, text in swatches
    )
    return f'<div class="legend"><span>one colour a request</span>{items}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
