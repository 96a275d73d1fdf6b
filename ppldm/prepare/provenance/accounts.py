"""What became of rows in every stage, read from the records that the stages leave: the funnel from metadata to parts.

Nothing is written and nothing is read but small JSON files. Laws. In each stage, rows in = rows out + rows dropped, by
reason. What has no records on this machine is left out: stages that follow each other need not be whole.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...utils.files import read_json
from ..convert.units import NOT_DOWNLOADED
from ..download.failures import merge_reports
from ..place import natural_key


@dataclass(frozen=True)
class StageResult:
    """What became of a stage's rows. `seconds` are those of all runs that it took."""

    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    bytes: int
    seconds: float = 0.0


def read_filter(folder: Path) -> StageResult | None:
    """Of what `ppldm filter` has finished; None where the folder holds no such thing."""
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or "rows_out" not in manifest or "conditions" not in manifest:
        return None
    dropped = {entry["condition"]: entry["rows"] for entry in manifest["dropped"]}
    return StageResult(manifest["rows_in"], manifest["rows_out"], dropped, _sum_bytes(manifest))


def of_download(report: dict) -> StageResult:
    """Of an account of `ppldm download` that has come to its end."""
    return StageResult(report["rows"], report["success"], report["failed"], report["bytes"])


def read_download(folder: Path) -> StageResult | None:
    """Of the parts in a folder that `ppldm download` has ended. What it could not even try is dropped so far."""
    reports = [read_json(path) for path in sorted(folder.glob("part_*/.download/report.json"), key=natural_key)]
    reports = [report for report in reports if report]
    if not reports:
        return None
    whole = merge_reports(reports)
    pending = {"not tried yet": whole["pending"]} if whole["pending"] else {}
    return of_download(whole | {"failed": whole["failed"] | pending})


def read_convert(folder: Path) -> StageResult | None:
    """Of what `ppldm convert` or `ppldm repack` has finished. Rows without a picture are the download's."""
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or "rows_out" not in manifest or "skipped" not in manifest:
        return None
    skipped = {reason: count for reason, count in manifest["skipped"].items() if reason != NOT_DOWNLOADED}
    rows_in = manifest["rows_in"] - manifest["skipped"].get(NOT_DOWNLOADED, 0)
    return StageResult(rows_in, manifest["rows_out"], skipped, _sum_bytes(manifest))


def read_stages(folders: Iterable[Path]) -> list[tuple[str, Path, StageResult]]:
    """(name, folder, result) of every stage that left records in these folders, the earlier stages first. Of a
    conversion the folders that it was made from are looked into as well; of a pipeline all its folders."""
    found = {}
    for folder in _with_sources(folders):
        for name, read in _READERS.items():
            if (name, folder) not in found and (result := read(folder)):
                found[name, folder] = result
    order = list(_READERS)
    return [(name, folder, found[name, folder]) for name, folder in sorted(found, key=lambda one: order.index(one[0]))]


def _with_sources(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(path.resolve() for path in folders):
        yield folder
        plan = read_json(folder / ".convert" / "plan.json") or {}
        if "source" in plan and "://" not in plan["source"]:
            yield (folder / plan["source"]).resolve()
        for whole in (folder, folder.parent):
            if (whole / ".pipeline").is_dir():
                yield from (whole / name for name in ("metadata", "images", "data"))


def _sum_bytes(manifest: dict) -> int:
    return sum(part.get("bytes", 0) for part in manifest["parts"])


_READERS = {"filter": read_filter, "download": read_download, "convert": read_convert}
