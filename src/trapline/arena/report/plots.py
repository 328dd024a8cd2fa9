"""Every plot of the report, as SVG that takes its colours from the page around it.

matplotlib draws with stand-in colours; `_finish` replaces them by the style sheet's variables,
so that one picture serves light, dark and print.
"""

import io
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from trapline.arena.errors import MissingError

#: Stand-in colour → variable of the style sheet.
_COLOURS = {
    "#010203": "ink",
    "#010204": "soft",
    "#010205": "line",
    "#010206": "accent",
    "#010208": "warn",
}
INK, SOFT, LINE, ACCENT, WARN = _COLOURS
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trapline",
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
#: Inches.
WIDTH, BELOW, ABOVE = 5.8, 0.55, 0.12
MOST_NAMED_LINES = 12
#: Beyond this many rows, labels are left out: the table beside the plot has the names.
MOST_LABELS = 40


def matplotlib_module() -> Any:
    """Imports matplotlib when the first plot is drawn: it takes a second."""
    try:
        import matplotlib
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise MissingError("plots need matplotlib: pip install 'trapline[report]'") from None
    return matplotlib


def _figure(width: float, height: float) -> Any:
    # No layout engine: it would draw everything twice, and the margins are known.
    return matplotlib_module().figure.Figure(figsize=(width, height))


def _finish(fig: Any, label: str) -> Markup:
    """The figure as an inline SVG with a text alternative."""
    return _labelled(_svg(fig, f"p{zlib.crc32(label.encode(errors='replace')):08x}"), label)


def _labelled(svg: str, label: str) -> Markup:
    opening = f'<svg role="img" aria-label="{escape(label)}" '
    return Markup(opening + svg[len("<svg ") :])  # noqa: S704 - matplotlib escapes text it draws


def _svg(fig: Any, scope: str) -> str:
    """The figure's SVG without what a page does not need; its ids begin with the scope."""
    buffer = io.StringIO()
    with _context(), warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S
    )
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{scope}-", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for stand_in, variable in _COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    return svg.strip()


def _draw(height: float, left: float, right: float = 0.15) -> tuple[Any, Any]:
    """A figure with one pair of axes; margins in inches."""
    with _context():
        fig = _figure(WIDTH, height)
        box = (left / WIDTH, BELOW / height)
        size = (1 - (left + right) / WIDTH, 1 - (BELOW + ABOVE) / height)
        axes = fig.add_axes((*box, *size))
        axes.spines[["left", "bottom"]].set_visible(False)
        return fig, axes


def _label_width(labels: Sequence[str]) -> float:
    return 0.25 + 0.082 * max((len(label) for label in labels), default=0)


def _finish_axes(axes: Any, grid: str, *logarithmic: Any) -> None:
    """Plain axes; logarithmic ones get decimal labels."""
    for scale in logarithmic:
        low, high = sorted(scale.get_view_interval())
        subs = (1, 2, 5) if high < 60 * low else (1,)
        scale.set_major_locator(matplotlib_module().ticker.LogLocator(subs=subs))
        scale.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(axis=grid)
    axes.tick_params(length=0)


def _context() -> Any:
    return matplotlib_module().rc_context(_STYLE)


def plain(text: str) -> str:
    """Text that matplotlib draws literally: no math mode, no unprintable characters."""
    shown = "".join(char if char.isprintable() else "�" for char in text).replace("$", r"\$")
    return shown if len(shown) <= 28 else shown[:27] + "…"


def dots(
    values: Mapping[str, float], xlabel: str, label: str, *, line_at: float | None = None
) -> Markup:
    """One dot per name on a logarithmic axis, largest first, with a reference line."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    many = len(ordered) > MOST_LABELS
    with _context():
        labels = [] if many else [plain(name) for name, _ in ordered]
        height = 3.4 if many else ABOVE + BELOW + 0.27 * len(ordered)
        fig, axes = _draw(height, _label_width(labels))
        places = np.arange(len(ordered))
        figures = np.array([value for _, value in ordered])
        if not many:
            axes.hlines(places, figures.min(), figures, color=LINE, linewidth=1)
        axes.plot(figures, places, "o", color=ACCENT, markersize=4 if many else 6.5)
        if line_at is not None:
            axes.axvline(line_at, color=WARN, linewidth=1.4, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        axes.set_yticks(
            [] if many else places, [] if many else [plain(name) for name, _ in ordered]
        )
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.set_xlabel(xlabel)
        _finish_axes(axes, "x", axes.xaxis)
        return _finish(fig, label)


def _named_lines(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for name, points in series.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "-o", color=ACCENT, markersize=4, linewidth=1.4, alpha=0.75)
        axes.annotate(plain(name), (x[-1], y[-1]), xytext=(6, 0), fontsize=8.5,
                      textcoords="offset points", va="center", color=INK)  # fmt: skip


def growth(
    series: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str, label: str
) -> Markup:
    with _context():
        faint = len(series) > MOST_NAMED_LINES
        fig, axes = _draw(3.6, 0.8, 0.2 if faint else _label_width([plain(n) for n in series]))
        axes.set_xscale("log")
        axes.set_yscale("log")
        if faint:
            collection = matplotlib_module().collections.LineCollection(
                list(series.values()), colors=ACCENT, linewidths=1.4, alpha=0.3
            )
            axes.add_collection(collection)
            axes.autoscale_view()
        else:
            _named_lines(axes, series)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        _finish_axes(axes, "both", axes.xaxis, axes.yaxis)
        return _finish(fig, label)


def scatter(points: Mapping[str, tuple[float, float]], xlabel: str, label: str) -> Markup:
    """Mean score over a positive quantity on a logarithmic axis, one named dot per entrant."""
    with _context():
        fig, axes = _draw(3.6, 0.7, 0.3)
        axes.set_xscale("log")
        axes.set_ylabel("mean score")
        axes.set_xlabel(xlabel)
        axes.set_ylim(0, 104)
        x, y = zip(*points.values(), strict=True)
        axes.plot(x, y, "o", color=ACCENT, markersize=6.5)
        axes.set_xlim(min(x) / 1.6, max(x) * 2.5)
        if len(points) <= MOST_LABELS:
            for name, place in points.items():
                axes.annotate(plain(name), place, xytext=(7, 0), fontsize=8.5,
                              textcoords="offset points", va="center", color=INK)  # fmt: skip
        _finish_axes(axes, "both", axes.xaxis)
        return _finish(fig, label)


def roofline(
    answers: Sequence[tuple[str, float, float]],
    marks: Mapping[str, Sequence[tuple[float, float]]],
    rates: Mapping[str, float],
    label: str,
) -> Markup:
    """Named answers, and marks of `gold` and `torch`, as (FLOP a byte, TFLOP a second)."""
    with _context():
        fig, axes = _draw(3.9, 0.8, 0.3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        places = [x for _, x, _ in answers] + [x for group in marks.values() for x, _ in group]
        ridge = rates["bfloat16"] / rates["copy"]
        left, right = min(*places, 1.0) / 3, max(*places, ridge) * 5
        _draw_roofs(axes, rates, (left, right))
        for kind, marker in (("torch", "x"), ("gold", "D")):
            for x, y in marks.get(kind, ()):
                axes.plot(x, y, marker, color=SOFT, markersize=6, fillstyle="none")
        named: set[str] = set()
        for name, x, y in answers:
            axes.plot(x, y, "o", color=ACCENT, markersize=5, alpha=0.8)
            if name not in named and 1 < len({n for n, _, _ in answers}) <= MOST_NAMED_LINES:
                axes.annotate(plain(name), (x, y), xytext=(7, -3), fontsize=8,
                              textcoords="offset points", color=INK)  # fmt: skip
            named.add(name)
        axes.set_xlim(left, right)
        axes.set_xlabel("operations a byte")
        axes.set_ylabel("TFLOP/s")
        _finish_axes(axes, "both", axes.xaxis, axes.yaxis)
        return _finish(fig, label)


def _draw_roofs(axes: Any, rates: Mapping[str, float], ends: tuple[float, float]) -> None:
    """What memory and the two kinds of matrix products allow."""
    for kind, style in (("bfloat16", "-"), ("float32", (0, (4, 3)))):
        ridge = min(max(rates[kind] / rates["copy"], ends[0]), ends[1])
        places = (ends[0], ridge, ends[1])
        roof = [min(x * rates["copy"], rates[kind]) / 1e12 for x in places]
        axes.plot(places, roof, color=WARN, linewidth=1.2, linestyle=style)
        axes.annotate(f"{kind} product", (ends[1], roof[-1]), xytext=(-4, 4), fontsize=8,
                      textcoords="offset points", ha="right", color=SOFT)  # fmt: skip


def win_rates(names: Sequence[str], chances: Sequence[Sequence[float]], label: str) -> Markup:
    """P(row beats column) as a heat map, for fields too large for a table."""
    with _context():
        fig, axes = _draw(4.6, 0.8)
        last = len(names) + 0.5
        image = axes.imshow(
            np.asarray(chances, float),
            cmap="BrBG",
            vmin=0.0,
            vmax=1.0,
            extent=(0.5, last, last, 0.5),
        )
        axes.set_xlabel("the column's place in the standings")
        axes.set_ylabel("the row's place in the standings")
        bar = fig.colorbar(image, ax=axes, shrink=0.7)
        bar.set_label("probability that the row is better", color=SOFT)
        axes.tick_params(length=0)
        return _finish(fig, f"{label} ({len(names)} entrants)")


class EntrantPlot:
    """Shape over the dimensions and trajectory over difficulty.

    The frame, with its many labels, is drawn once; each entrant adds three artists on top of it.
    """

    def __init__(
        self, dimensions: Sequence[str], field: Sequence[float], stages: Sequence[str]
    ) -> None:
        self._spokes = np.linspace(0, 2 * np.pi, len(dimensions), endpoint=False)
        with _context():
            self._figure = _figure(9.2, 3.7)
            left = self._figure.add_axes((0.07, 0.11, 0.32, 0.77), projection="polar")
            right = self._figure.add_axes((0.53, 0.12, 0.45, 0.82))
            median = self._draw_shape_frame(left, dimensions, field)
            right.set_xticks(np.arange(len(stages)), stages)
            right.set_xlim(-0.4, max(len(stages) - 0.6, 0.6))
            right.set_ylim(0, 104)
            right.set_ylabel("score")
            right.grid(axis="y")
            right.tick_params(length=0)
            right.spines[["left", "bottom"]].set_visible(False)
            self._frame = _svg(self._figure, "frame").removesuffix("</svg>")
            median.set_visible(False)
            left.set_axis_off()
            right.set_axis_off()
            nothing = np.zeros(len(self._spokes) + 1)
            (self._shape,) = left.fill(nothing, nothing, linewidth=1.8, edgecolor=ACCENT)
            self._shape.set_facecolor((ACCENT, 0.25))
            self._places = np.arange(len(stages))
            (self._line,) = right.plot(self._places, self._places, "-o", color=ACCENT, linewidth=2)
            (self._points,) = right.plot([], [], "o", color=SOFT, markersize=4, alpha=0.55)

    def _draw_shape_frame(
        self, axes: Any, dimensions: Sequence[str], field: Sequence[float]
    ) -> Any:
        around = np.append(self._spokes, self._spokes[:1])
        axes.set_theta_zero_location("N")
        axes.set_theta_direction(-1)
        axes.set_xticks(self._spokes, dimensions)
        axes.set_rlim(0, 100)
        axes.set_rgrids([25, 50, 75, 100], labels=["", "50", "", "100"], color=SOFT, fontsize=7.5)
        axes.spines["polar"].set_color(LINE)
        axes.tick_params(labelcolor=INK, pad=4, labelsize=9)
        closed = np.append(field, field[:1])
        (median,) = axes.plot(around, closed, color=SOFT, linewidth=1.2, linestyle=(0, (3, 3)))
        return median

    def render(
        self,
        shape: Sequence[float],
        means: Sequence[float | None],
        scores: Sequence[tuple[int, float]],
        label: str,
    ) -> Markup:
        """The plot of one entrant: a value per dimension, a mean per stage, a dot per cell."""
        closed = np.append(shape, shape[:1])
        around = np.append(self._spokes, self._spokes[:1])
        self._shape.set_xy(np.column_stack([around, closed]))
        self._line.set_ydata([np.nan if mean is None else mean for mean in means])
        self._points.set_data([stage for stage, _ in scores], [score for _, score in scores])
        added = _svg(self._figure, "entrant")
        return _labelled(self._frame + added[added.index(">") + 1 :], label)
