"""A picture of buckets: how many rows have which shape, how much of them is cut away, and which rows have none."""

from pathlib import Path

from ..utils.files import atomic_write

BUCKETS_FILE = "buckets.png"  # in a run's folder
_ROW_HEIGHT = 0.28  # inches


def draw_chart(path: Path, report: dict, skipped: dict[str, int]) -> None:
    """Write a PNG: a bar of rows for each shape of a report (`Buckets.report`), the tall ones first, darker where more
    is cut away; below them the rows that are not used, by reason. Raises OutputError."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shapes = sorted(report["shapes"], key=lambda one: (one["width"] / one["height"], one["width"]))
    names = [f"{one['width']} x {one['height']}" for one in shapes] + [f"not used: {reason}" for reason in skipped]
    rows = [one["rows"] for one in shapes] + list(skipped.values())
    colours = ScalarMappable(Normalize(0, max(0.5, *(one["cut"] for one in shapes))), "Blues")
    figure = Figure(figsize=(9, 1.5 + _ROW_HEIGHT * len(rows)), layout="constrained")
    axis = figure.subplots()
    filled = [colours.to_rgba(one["cut"]) for one in shapes] + ["#bb3333"] * len(skipped)
    bars = axis.barh(names, rows, color=filled, edgecolor="#335577")
    texts = [f"{one['rows']:,}, {one['cut']:.0%} cut away" for one in shapes] + [f"{n:,}" for n in skipped.values()]
    axis.bar_label(bars, texts, padding=4, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel("rows")
    axis.set_title(f"{report['rows']:,} rows by shape, width x height in pixels; {report['cut']:.1%} of them cut away")
    figure.colorbar(colours, ax=axis, label="share cut away", format=lambda share, _: f"{share:.0%}")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
