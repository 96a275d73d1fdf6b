"""`ppldm stats`: what is in the parts: rows, sizes, caption lengths, tokens, shapes, and why rows are bad; with
`--html`, one page of all of it: also the facts that rows carry, their way here, and some of them. Images are not
decoded: their sizes come from the index.

Their way leads from metadata to training steps: the records of preparation, what stats has read, a run's skips. In each
stage, rows in = rows out + rows dropped, by reason; a run's rows in are those that it drew, epoch after epoch.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from ..config.data import DataOptions
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.row import describe_other_text
from ..data.shapes import describe as describe_shapes
from ..data.shapes import draw_chart
from ..data.text.captions import CaptionRule, Coverage, CoverageMeter
from ..prepare.pipeline import read_stages
from ..training.metrics import METRICS_FILE, read_metrics, skipped_rows
from ..utils.errors import ConfigError, DataError, OutputError
from ..utils.files import atomic_write, local_path
from ..utils.log import get_logger, progress
from ..utils.pictures import save_png
from ..utils.processes.workers import check_workers
from ..utils.text import count_of, escape, print_report
from ..utils.web.page import data_url, new_figure, render
from .buckets import preview_shapes, read_settings
from .cached import describe_survey, survey
from .measure import (
    CONTROL,
    MEASURES,
    MOST_ROWS,
    QUANTILES,
    SHOWN,
    TOKENS,
    Measured,
    draw_histogram,
    draw_histograms,
    measure,
    quantiles,
    read_labels,
)
from .parts import Indexed, check_output, describe_bad_parts, describe_not_rows, index_parts, list_parts
from .show import choose_rows, read_tile

READ = "read"
NUM_ROWS = 200  # that are shown
_SEED = 0  # of their choice
_SIDE, _QUALITY = 192, 80  # pixels, of JPEG
_SHEET_WIDTH = 1200  # pixels
_CAPTION_LENGTH = 600  # characters that are shown
_Words = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "KEY=VALUE"}]
_Folders = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "FOLDER"}]


def stats(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: str = "",  # write histograms to this PNG
    html: str = "",  # write one page of all of it to this file, with 200 rows; it opens without a network
    records: _Folders = (),  # with --html: folders of a filter, download, conversion or run, for the way of rows
    labels: str = "",  # with --html: labels.parquet of `ppldm dedup`, for pictures that are copies
    tokenizer: _Folders = (),  # folders with tokenizers (`ppldm vocab` makes one): also count tokens and unknown words
    max_length: int = 77,  # with --tokenizer: tokens of a caption, as --model_max_length; longer ones are cut
    buckets: str = "",  # ratios, steps or a list of width x height: also count rows by shape (docs/data.md)
    settings: _Words = (),  # with --buckets: further settings of a run's data, as resolution=512 bucket_step=64
    sheet: str = "",  # with --buckets: draw rows of every shape, and what is cut of them, to this PNG
    chart: str = "",  # with --buckets: draw how many rows have which shape to this PNG
    captions: str = "",  # measure these texts of a row, as --captions of training: caption:0.5,caption_blip:0.5
    clean_captions: bool = False,  # measure captions cleaned, as training with --clean_captions sees them
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    latents_dir: str = "",  # folder with the files of latents and text embeddings; by default they lie beside parts
    num_workers: int = 0,  # processes; 0 means one per core
    json: bool = False,  # print the numbers as JSON
):
    """Say what filelists hold: rows, image sizes, caption lengths, reasons of bad rows, cached latents."""
    from ..data.text.tokenizer import load_tokenizer

    if (records or labels) and not html:
        raise ConfigError("--records and --labels say nothing without --html; name a file for the page")
    shapes = _read_shape_settings(buckets, settings, html, [sheet, chart])
    for path in filter(None, (out, html, sheet, chart)):
        check_output(path)
    rule, num_workers = CaptionRule.of_flags(captions, clean_captions), check_workers(num_workers)
    meters = [CoverageMeter(load_tokenizer(one, max_length)) for one in tokenizer]
    parts = list_parts(filelists, layout, must_exist=False, latents_dir=latents_dir)
    indexed = index_parts(parts, num_workers)
    found = measure(indexed, rule, meters, num_workers, with_facts=bool(html))
    report = {
        "parts": len(parts),
        "rows": indexed.num_rows,
        "skipped": dict(found.skipped.most_common()),
        "not_rows": dict(found.not_rows),
        "bad_parts": indexed.bad_parts(),
        "second_images": found.counts["control_kb"].total(),
        "quantiles": list(QUANTILES),
        **{measure: quantiles(values) for measure, values in found.counts.items()},
        **(survey(indexed.rows, num_workers, check_bytes=False) | found.other_text),
    }
    if meters:
        first, *others = found.coverages
        told = {name: one.describe(max_length) for name, one in zip(tokenizer[1:], others, strict=True)}
        report |= {"unknown_share": first.unknown_share, "cut_share": first.cut_share(max_length)}
        report |= {"tokenizer": f"of all captions, {first.describe(max_length)}", "tokenizers": told}
    if buckets:
        report["buckets"] = _report_shapes(indexed, shapes, sheet, chart)
    if out:
        title = f"{report['rows']} rows in {len(parts)} part(s)"
        draw_histograms(out, found.counts, MEASURES | TOKENS, found.skipped, title)
    if html:
        names = [Path(one).name for one in filelists]
        report |= write_page(html, names, indexed, found, records, labels, (tokenizer, max_length), shapes)
    report["written"] = [path for path in (out, html, sheet, chart) if path]
    print_report(report, describe, json)


def _report_shapes(indexed: Indexed, shapes: DataOptions, sheet: str, chart: str) -> dict:
    report, draw = preview_shapes(indexed, shapes)
    if chart:
        draw_chart(Path(chart), report, report["skipped"])
    if sheet:
        save_png(Path(sheet), draw())
    return report


def _read_shape_settings(buckets: str, words: list[str], html: str, pictures: list[str]) -> DataOptions | None:
    """What rows would be given shapes by; None where nothing asks for shapes. Raises ConfigError."""
    if not buckets and (any(pictures) or (words and not html)):
        raise ConfigError("--settings, --sheet and --chart say nothing without --buckets; add --buckets ratios")
    if not buckets and not html:
        return None
    return read_settings(buckets or "ratios", words)


def describe(report: dict) -> str:
    seconds = f", {report['second_images']} with a second image" if report["second_images"] else ""
    lines = [f"{report['rows']} rows in {report['parts']} part(s){seconds}"]
    heads = [{0: "min", 0.5: "median", 1: "max"}.get(share, f"{share:.0%}") for share in report["quantiles"]]
    lines.append(f"{'':<22}" + "".join(f"{head:>9}" for head in heads))
    for name, title in (MEASURES | CONTROL | TOKENS).items():
        if report.get(name):
            lines.append(f"{title:<22}" + "".join(f"{value:>9g}" for value in report[name]))
    if "tokenizer" in report:
        lines.append(report["tokenizer"])
        lines += [f"by {name}, {told}" for name, told in report["tokenizers"].items()]
    lines += [f"  bad rows, {reason}: {count}" for reason, count in report["skipped"].items()]
    if "buckets" in report:
        lines += describe_shapes(report["buckets"])
        lines += [f"  not used, {reason}: {count:,}" for reason, count in report["buckets"]["skipped"].items()]
    lines += describe_not_rows(report["not_rows"]) + describe_other_text(report) + describe_survey(report)
    lines += describe_bad_parts(report["bad_parts"])
    return "\n".join(lines + [f"look at {path}" for path in report["written"]])


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
