"""The page of a data set: what `ppldm stats` counts, the facts that rows carry, their way here, and some of them.

Their way leads from metadata to training steps: the records of preparation, what stats has read, a run's skips. In each
stage, rows in = rows out + rows dropped, by reason; a run's rows in are those that it drew, epoch after epoch.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..config.data import DataOptions
from ..data.text.captions import Coverage
from ..prepare.pipeline import read_stages
from ..training.metrics import METRICS_FILE, read_metrics, skipped_rows
from ..utils.errors import ConfigError, DataError, OutputError
from ..utils.files import atomic_write, local_path
from ..utils.log import get_logger, progress
from ..utils.text import count_of, escape
from ..utils.web.page import data_url, new_figure, render
from .buckets import preview_shapes
from .measure import CONTROL, MEASURES, MOST_ROWS, QUANTILES, SHOWN, Measured, draw_histogram, quantiles, read_labels
from .parts import Indexed
from .show import choose_rows, read_tile

READ = "read"
NUM_ROWS = 200  # that are shown
_SEED = 0  # of their choice
_SIDE, _QUALITY = 192, 80  # pixels, of JPEG
_SHEET_WIDTH = 1200  # pixels
_CAPTION_LENGTH = 600  # characters that are shown


def find_way(parts: Iterable[Path], records: Iterable[str], rows: int, skipped: dict[str, int]) -> list[dict]:
    """The stages that parts went through, the first one first, by the records beside the parts and in the folders
    `records`. rows, skipped: what was read of the parts, and what of it is bad. Raises ConfigError for a folder without
    records, DataError."""
    named = [local_path(one) for one in records]
    runs = [folder for folder in named if (folder / METRICS_FILE).is_file()]
    for folder in named:
        if folder not in runs and not read_stages([folder]):
            raise ConfigError(
                f"--records {folder} holds no records; name the folder that filter, download, convert, pipeline or "
                "train has written"
            )
    beside = (folder for path in parts for folder in (path.parent.parent, path.parent))
    way = [
        _stage(name, result.rows_in, result.rows_out, result.dropped, str(folder))
        for name, folder, result in read_stages([*named, *dict.fromkeys(beside)])
    ]
    way.append(_stage(READ, rows, rows - sum(skipped.values()), skipped))
    return way + [step for run in runs if (step := _read_run(run))]


def _read_run(folder: Path) -> dict | None:
    """What a run drew; None before its first line that says its speed."""
    records = [one for one in read_metrics(folder / METRICS_FILE) if one.get("images_per_second")]
    if not records:
        return None
    last = records[-1]
    samples = last["global_step"] * round(last["images_per_second"] * last["avg_batch_cost"])
    dropped = skipped_rows(last)
    return _stage("train", samples + sum(dropped.values()), samples, dropped, str(folder))


def _stage(name: str, rows_in: int, rows_out: int, dropped: dict[str, int], place: str = "") -> dict:
    """One stage of the way, rows dropped by reason, the most frequent first. place: the folder of its records."""
    reasons = sorted(((why, rows) for why, rows in dropped.items() if rows), key=lambda one: (-one[1], one[0]))
    return {"name": name, "rows_in": rows_in, "rows_out": rows_out, "dropped": dict(reasons), "place": place}


def write_page(
    path: str,
    names: Sequence[str],
    indexed: Indexed,
    found: Measured,
    records: Sequence[str],
    labels: str,
    tokenizers: tuple[Sequence[str], int],
    shapes: DataOptions,
) -> dict:
    """Write the page of parts to a file and return its numbers, JSON-ready. names: of the data. records: as `find_way`.
    tokenizers: the names of those of `found.coverages`, and the tokens of a caption. Raises ConfigError, DataError,
    OutputError."""
    found.facts.pictures = read_labels(labels, indexed.num_rows) if labels else {}
    parts = [part.path for part in (*indexed.rows, *indexed.bad)]
    scores = found.facts.shown_scores
    coverages = list(zip(tokenizers[0], found.coverages, strict=True))
    preview, sheet = _preview(indexed, shapes)
    report = {
        "facts": found.facts.report(),
        "scores": {name: {"rows": values.total(), "quantiles": quantiles(values)} for name, values in scores.items()},
        "tokens": [_describe_tokens(name, one, tokenizers[1]) for name, one in coverages],
        "way": find_way(parts, records, indexed.num_rows, found.skipped),
        "shapes": preview,
    }
    lengths = {f"caption, tokens of {name}": one.lengths for name, one in coverages}
    measures = {title: found.counts[name] for name, title in (MEASURES | CONTROL).items() if found.counts[name]}
    html = render(
        Path(__file__).with_name("page.html").read_text("utf-8"),
        title=", ".join(names),
        rows=indexed.num_rows,
        good=indexed.num_rows - found.skipped.total(),
        parts=len(parts),
        bad_parts=list(indexed.bad.values()),
        measures={title: values for title, values in (measures | lengths).items() if values},
        counts=scores,
        quantiles=quantiles,
        chart=_chart,
        quantile_names=[{0: "least", 0.5: "median", 1: "most"}.get(one, f"{one:.0%}") for one in QUANTILES],
        sheet=sheet,
        resolution=shapes.resolution,
        pictures=_read_pictures(indexed),
        stride=found.facts.stride,
        limits={"shown": SHOWN, "looked": MOST_ROWS, "max_length": tokenizers[1]},
        count_of=count_of,
        escape=escape,
        **report,
    )
    try:
        with atomic_write(local_path(path)) as file:
            file.write(html.encode("utf-8", "replace"))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --html") from error
    get_logger().info("page: %s", path)
    return report


def _describe_tokens(name: str, coverage: Coverage, max_length: int) -> dict:
    return {
        "tokenizer": name,
        "max_length": max_length,
        "captions": coverage.captions,
        "cut": sum(count for length, count in coverage.lengths.items() if length > max_length),
        "unknown_share": coverage.unknown_share,
        "median": coverage.length_at(0.5),
        "longest": coverage.length_at(1),
        "unknown": [word for word, _ in coverage.unknown.most_common(10)],
    }


def _preview(indexed: Indexed, shapes: DataOptions) -> tuple[dict, str]:
    """(which rows get which shape, or {"error": why none does}; a URL of their contact sheet)."""
    try:
        report, draw = preview_shapes(indexed, shapes)
    except DataError as error:
        return {"error": str(error)}, ""
    return report, data_url(draw(), (_SHEET_WIDTH, 10 * _SHEET_WIDTH), _QUALITY)


def _chart(title: str, values):
    figure, axes = new_figure(title)
    draw_histogram(axes, values)
    return figure


def _read_pictures(indexed: Indexed) -> list[tuple[str, int, int, str, str]]:
    """(URL of the picture, "" of a bad row; pixels that it is shown wide; the factor of its enlargement; caption, or
    why it is bad; which row it is) of rows chosen at random, in their order."""
    found = []
    rows = choose_rows(indexed.num_rows, NUM_ROWS, _SEED) if indexed.num_rows else []
    with progress(total=len(rows), desc="pictures", unit="row", delay=1) as bar:
        for row in sorted(rows):
            image, caption, place = read_tile(indexed, row)
            if len(caption) > _CAPTION_LENGTH:
                caption = caption[:_CAPTION_LENGTH] + "…"
            factor = max(1, _SIDE // max(image.size)) if image else 1
            url = data_url(image, (_SIDE, _SIDE), _QUALITY) if image else ""
            found.append((url, min(_SIDE, factor * image.width) if image else 0, factor, caption, place))
            bar.update()
    return found
