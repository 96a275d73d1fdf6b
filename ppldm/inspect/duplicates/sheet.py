"""What was found, to look at: a histogram of the clusters, and a sheet of some of them."""

from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image

from ...data.images.decode import decode_image
from ...utils.errors import RowError
from ...utils.files import atomic_write
from ...utils.grid import pad_alike, prompt_grid
from ...utils.pictures import save_png
from ..histograms import draw_histogram as draw_counts
from ..parts import Span, open_rows
from .labels import Labels

_CLUSTERS, _OF_EACH, _SIDE = 12, 5, 128


def draw_histogram(path: Path, sizes: Counter, distances: Counter, unit: str) -> None:
    """How many clusters are of which size, and how many copies that are other files at which distance, in `unit`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"pictures of a cluster": (sizes, "clusters"), f"{unit} from the kept picture": (distances, "copies")}
    for axis, (title, (counts, things)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axis.set_xlabel(title)
        axis.set_ylabel(things)
        draw_counts(axis, counts)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)


def draw_sheet(path: Path, spans: list[Span], labels: Labels, unit: str) -> None:
    """Up to 12 clusters spread from the farthest copies to the nearest, each with the kept picture first; no file where
    there are none."""
    path.unlink(missing_ok=True)
    found = np.flatnonzero(labels.dropped)
    if not len(found):
        return
    # By their farthest copy: where a limit is too wide is seen there.
    farthest = found[np.lexsort((found, labels.distance[found]))][::-1]
    clusters = list(dict.fromkeys(labels.cluster[farthest].tolist()))
    shown = [clusters[place] for place in np.linspace(0, len(clusters) - 1, min(_CLUSTERS, len(clusters))).astype(int)]
    captions, pictures = [], []
    for kept in shown:
        copies = found[labels.cluster[found] == kept]
        copies = copies[np.argsort(-labels.distance[copies], kind="stable")][: _OF_EACH - 1]
        said = ", ".join("same file" if labels.same_file[row] else f"{labels.distance[row]}" for row in copies)
        captions.append(f"row {kept}: {labels.copies[kept]} pictures; {unit}: {said}")
        pictures.append([_read_small(spans, int(row)) for row in (kept, *copies)])
    save_png(path, prompt_grid(captions, _square(pictures), side=_SIDE))


def _square(rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Each with a white square before it, which all are padded to, so that all become of one size."""
    white = np.full((_SIDE, _SIDE, 3), 255, np.uint8)
    return [list(pad_alike([white, *row]))[1:] for row in rows]


def _read_small(spans: list[Span], row: int) -> np.ndarray:
    """A picture by its number through all rows, uint8, sides at most _SIDE; grey where it is gone."""
    for span in spans:
        if row < span.stop - span.start:
            break
        row -= span.stop - span.start
    try:
        with closing(open_rows(span.part)) as part:
            picture = decode_image(part.read(span.start + row).image)
    except RowError:
        return np.full((_SIDE, _SIDE, 3), 128, np.uint8)
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return np.asarray(picture)
