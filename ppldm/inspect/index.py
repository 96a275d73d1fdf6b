"""`ppldm index`: build the indexes and columns of all parts, ahead of training."""

from typing import Annotated

from ..data.formats.layouts import DEFAULT_LAYOUT
from ..utils.errors import DataError
from ..utils.processes.workers import check_workers
from ..utils.report import print_report
from .parts import describe_bad_parts, index_parts, list_parts


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
    print_report(report, _describe, json)
    if indexed.bad:
        raise DataError(f"{len(indexed.bad)} of {len(parts)} parts cannot be opened; see above")


def _describe(report: dict) -> str:
    return "\n".join([f"{report['rows']} rows in {report['parts']} part(s)", *describe_bad_parts(report["bad_parts"])])
