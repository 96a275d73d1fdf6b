"""`ppldm stats`: what is in the parts: rows, sizes, caption lengths, and the reasons why rows are bad.

With a tokenizer, captions are counted in tokens too, and the words that it does not know. With `--buckets`, which
shapes the rows would be trained in, and what of them is cut away. With `--html`, one page of all of it, and more
(`page/`).

Images are not decoded: their sizes come from the index, their bytes and captions from the rows.
"""

from pathlib import Path
from typing import Annotated

from ..config.data import DataOptions
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.row import describe_other_text
from ..data.shapes import describe as describe_shapes
from ..data.text.captions import CaptionRule
from ..data.text.coverage import Coverage, CoverageMeter
from ..utils.errors import ConfigError
from ..utils.processes.workers import check_workers
from ..utils.report import print_report
from .cached import describe_survey, survey
from .histograms import QUANTILES, draw_histograms, quantiles
from .measure import CONTROL, MEASURES, TOKENS, measure
from .parts import check_output, describe_bad_parts, describe_not_rows, index_parts, list_parts

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
    if (records or labels) and not html:
        raise ConfigError("--records and --labels say nothing without --html; name a file for the page")
    shapes = _read_shape_settings(buckets, settings, html, [sheet, chart])
    if out:
        check_output(out)
    rule = CaptionRule.of_flags(captions, clean_captions)
    meters = [_open_meter(one, max_length) for one in tokenizer]
    parts = list_parts(filelists, layout, must_exist=False, latents_dir=latents_dir)
    num_workers = check_workers(num_workers)
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
        report |= _report_tokens(tokenizer, found.coverages, max_length)
    if buckets:
        from .buckets import report_shapes

        report["buckets"] = report_shapes(indexed, shapes, sheet, chart)
    if out:
        title = f"{report['rows']} rows in {len(parts)} part(s)"
        draw_histograms(out, found.counts, MEASURES | TOKENS, found.skipped, title)
    if html:
        from .page.facts import read_labels
        from .page.page import write_page

        found.facts.pictures = read_labels(labels, indexed.num_rows) if labels else {}
        names = [Path(one).name for one in filelists]
        report |= write_page(html, names, indexed, found, records, (tokenizer, max_length), shapes)
    report["written"] = [path for path in (out, html, sheet, chart) if path]
    print_report(report, describe, json)


def _open_meter(tokenizer: str, max_length: int) -> CoverageMeter:
    from ..data.text.tokenizer import load_tokenizer

    return CoverageMeter(load_tokenizer(tokenizer, max_length))


def _report_tokens(tokenizers: list[str], coverages: list[Coverage], max_length: int) -> dict:
    first = coverages[0]
    told = zip(tokenizers[1:], coverages[1:], strict=True)
    return {
        "unknown_share": first.unknown_share,
        "cut_share": first.cut_share(max_length),
        "tokenizer": f"of all captions, {first.describe(max_length)}",
        "tokenizers": {str(name): one.describe(max_length) for name, one in told},
    }


def _read_shape_settings(buckets: str, words: list[str], html: str, pictures: list[str]) -> DataOptions | None:
    """What rows would be given shapes by; None where nothing asks for shapes. Raises ConfigError, OutputError."""
    if not buckets and (any(pictures) or (words and not html)):
        raise ConfigError("--settings, --sheet and --chart say nothing without --buckets; add --buckets ratios")
    if not buckets and not html:
        return None
    from .buckets import read_settings

    for path in filter(None, (*pictures, html)):
        check_output(path)
    return read_settings(buckets or "ratios", words)


def describe(report: dict) -> str:
    """A report as a table."""
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
