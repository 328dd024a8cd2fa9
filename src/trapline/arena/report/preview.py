"""The picture that a link to the report shows: the title and the first of the ranking."""

import io

from trapline.arena.report.plots import matplotlib_module, plain
from trapline.arena.report.reading import Reading

MOST_BARS = 8
WIDTH, HEIGHT = 12.0, 6.3
PAPER, INK, SOFT, BAR = "#f7f5ef", "#1a211e", "#525c56", "#0b6352"


def picture(reading: Reading) -> bytes:
    """A PNG of 1200 by 630 pixels, the size that previews use."""
    title = str(reading.run.meta.get("title") or f"Run {reading.run.name}")
    rows = reading.ranking.standings[:MOST_BARS]
    figure = matplotlib_module().figure.Figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
    figure.text(0.06, 0.88, "Trapline", color=BAR, fontsize=20, fontweight="bold")
    figure.text(0.06, 0.79, plain(title), color=INK, fontsize=30, fontweight="bold")
    axes = figure.add_axes((0.3, 0.1, 0.64, 0.62), facecolor="none")
    places = range(len(rows))
    axes.barh(places, [row.mean_score for row in rows], color=BAR, height=0.6)
    axes.hlines(
        places, [row.score_low for row in rows], [row.score_high for row in rows], color=INK
    )
    axes.set_yticks(places, [plain(row.entrant) for row in rows], fontsize=16, color=INK)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("mean score, with its 95 % interval", color=SOFT, fontsize=14)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=SOFT)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, facecolor=PAPER)
    return buffer.getvalue()
