"""`ppldm stats`: what is in the parts: rows, sizes, caption lengths, tokens, shapes, and why rows are bad; with
`--html`, one page of all of it (`page`). Images are not decoded: their sizes come from the index."""

from pathlib import Path
from typing import Annotated

from ..config.data import DataOptions
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.row import describe_other_text
from ..data.shapes import describe as describe_shapes
from ..data.shapes import draw_chart
from ..data.text.captions import CaptionRule, CoverageMeter
from ..utils.errors import ConfigError
from ..utils.pictures import save_png
from ..utils.processes.workers import check_workers
from ..utils.text import print_report
from .buckets import preview_shapes, read_settings
from .cached import describe_survey, survey
from .measure import CONTROL, MEASURES, QUANTILES, TOKENS, draw_histograms, measure, quantiles
from .parts import Indexed, check_output, describe_bad_parts, describe_not_rows, index_parts, list_parts

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
        from .page import write_page

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
