"""`ppldm verify`: read and decode every row, as training will, and account for each; `ppldm index`: build indexes."""

from collections import Counter
from contextlib import closing
from typing import Annotated

from ..data.control import check_shape
from ..data.filelist import write_filelist
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.row import EXAMPLES_PER_REASON, describe_other_text, merge_other_text, noting_other_text
from ..data.images import decode_image
from ..utils.errors import DataError, RowError
from ..utils.processes.workers import check_workers
from ..utils.store.cache import name_of
from ..utils.text import print_report
from .cached import describe_survey, has_faults, survey
from .parts import (
    Span,
    check_output,
    count_not_rows,
    describe_bad_parts,
    describe_not_rows,
    index_parts,
    list_parts,
    open_rows,
    over_rows,
)


def verify(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: str = "",  # write a filelist of the parts without any bad row
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    latents_dir: str = "",  # folder with the files of latents and text embeddings; by default they lie beside parts
    num_workers: int = 0,  # processes; 0 means one per core
    json: bool = False,  # print {parts, rows, ok, skipped, examples, not_rows, bad_parts, cached} as JSON
):
    """Check that every row can be read and its image decoded.

    Of lists with layout=control also its second image, which must have the shape of the first.

    Blank lines are not rows: they are counted under not_rows, and are not a fault. Cached latents and text embeddings
    of the parts are compared with their checksums; parts that are not here are verified from their latents.
    The exit status is 1 if any row, part or file of latents is bad. A format other than part files is said where the
    filelist of --out is named, in a list of filelists, as for the original.
    """
    if out:
        check_output(out)
    parts = list_parts(filelists, layout, must_exist=False, latents_dir=latents_dir)
    num_workers = check_workers(num_workers)
    indexed = index_parts(parts, num_workers)
    skipped, not_rows, examples, unsound, texts = Counter(), Counter(), {}, set(indexed.bad), []
    for span, (errors, others, text) in over_rows(check_span, indexed, num_workers, "verify"):
        not_rows.update(others)
        texts.append(text)
        for reason, message in errors:
            skipped[reason] += 1
            examples[reason] = sorted([*examples.get(reason, ()), message])[:EXAMPLES_PER_REASON]
            unsound.add(span.part)
    report = {
        "parts": len(parts),
        "rows": indexed.num_rows,
        "ok": indexed.num_rows - skipped.total(),
        "skipped": dict(sorted(skipped.items())),
        "examples": dict(sorted(examples.items())),
        "not_rows": dict(not_rows),
        "bad_parts": indexed.bad_parts(),
        **merge_other_text(texts),
        **(cached := survey(indexed.rows, num_workers, check_bytes=True)),
    }
    print_report(report, describe, json)
    if out:
        write_filelist(out, [name_of(part.path) for part in parts if part not in unsound])
    if unsound:
        raise DataError(
            f"{len(unsound)} of {len(parts)} parts have bad rows or cannot be opened; --out FILE lists the rest"
        )
    if has_faults(cached):
        raise DataError(
            "cached latents or text embeddings are damaged; the `ppldm precompute` that made them repairs them"
        )


def check_span(span: Span) -> tuple[list[tuple[str, str]], Counter, dict]:
    """((reason, message) of each unusable row of a span, what lies between its rows, what text was not UTF-8)."""
    errors = []
    with closing(open_rows(span.part)) as part, noting_other_text() as noted:
        for row in range(span.start, span.stop):
            try:
                read = part.read(row)
                noted.end_row(f"{span.part.path} row {row}")
                if part.has_images:
                    size = decode_image(read.image).size
                    if read.control:
                        check_shape(decode_image(read.control).size[::-1], size[::-1])
                elif span.part.source.format == "mds" and span.part.path.exists():
                    part.check_latents(row)
            except RowError as error:
                where = f"{span.part.path} row {row}"
                text = str(error)
                errors.append((error.reason, text if text.startswith(where) else f"{where}: {text}"))
            noted.found.clear()
        return errors, count_not_rows(part, span), noted.report


def describe(report: dict) -> str:
    """A report in one line, and one line more for each reason and each part that cannot be opened."""
    lines = [f"{report['ok']} of {report['rows']} rows are good, in {report['parts']} part(s)"]
    for reason, count in sorted(report["skipped"].items(), key=lambda item: -item[1]):
        lines.append(f"  {reason}: {count}, for example {report['examples'][reason][0]}")
    lines += describe_not_rows(report["not_rows"]) + describe_other_text(report) + describe_survey(report)
    return "\n".join(lines + describe_bad_parts(report["bad_parts"]))


def index(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    num_workers: int = 0,  # processes; 0 means one per core
    json: bool = False,  # print {parts, rows, bad_parts: {path: error}} as JSON
):
    """Index the parts that filelists name, so that training, with --where too, starts at once.

    Indexes lie beside the parts, or in PPLDM_CACHE_DIR (~/.cache/ppldm) where these folders cannot be written. Parts
    are read where they lie: copies of parts that earlier versions made in that folder (*.gz, *.rows) can be deleted.
    """
    parts = list_parts(filelists, layout, must_exist=False)
    indexed = index_parts(parts, check_workers(num_workers), with_columns=True)
    report = {"parts": len(parts), "rows": indexed.num_rows, "bad_parts": indexed.bad_parts()}
    lines = [f"{report['rows']} rows in {report['parts']} part(s)", *describe_bad_parts(report["bad_parts"])]
    print_report(report, lambda _: "\n".join(lines), json)
    if indexed.bad:
        raise DataError(f"{len(indexed.bad)} of {len(parts)} parts cannot be opened; see above")
