"""The manifest of a folder that `ppldm convert` has written, and a search through the metadata of its rows."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from ...data.formats.part import Part
from ...data.formats.row import EXAMPLES_PER_REASON, merge_other_text
from ...utils.errors import ConfigError, DataError, RowError
from ...utils.files import read_json_object
from ...utils.log import progress
from ...utils.processes.workers import map_unordered
from ..block_list import BLOCKED
from ..provenance.forgotten import FORGOTTEN, Forgotten
from .units import NOT_DOWNLOADED

MAX_BAD_FRACTION = 0.5
OTHER_PROFILES = "other_profiles"  # of records and manifests, how many rows have one
ENCODED_ANEW = "encoded_anew"  # the same of pictures that do not go through as they are


def read_manifest(data: Path) -> dict:
    """The manifest of a finished conversion. Raises ConfigError, DataError."""
    if not (data / "manifest.json").is_file():
        raise ConfigError(f"no manifest.json in {data}; name a folder that `ppldm convert` has finished")
    return read_json_object(data / "manifest.json", DataError, "run `ppldm convert` again")


def merge_records(records: list[dict], sources: list[str], name: str, rows_per_part: int) -> dict:
    """The manifest of parts, whose records and sources are in their order."""
    skipped, examples, parts = Counter(), {}, []
    for number, (record, source) in enumerate(zip(records, sources, strict=True)):
        skipped.update(record["skipped"])
        for reason, texts in record["examples"].items():
            examples[reason] = (examples.get(reason, []) + texts)[:EXAMPLES_PER_REASON]
        if record["rows_out"]:
            path = f"parts/part-{number:05}.gz"
            facts = {"rows": record["rows_out"], "bytes": record["bytes"], "sha256": record["sha256"]}
            parts.append({"path": path, **facts, "source": source})
    return {
        "name": name,
        "rows_per_part": rows_per_part,
        "rows_in": sum(record["rows_in"] for record in records),
        "rows_out": sum(record["rows_out"] for record in records),
        "skipped": dict(sorted(skipped.items())),
        "examples": dict(sorted(examples.items())),
        **{
            name: count
            for name in (OTHER_PROFILES, ENCODED_ANEW)
            if (count := sum(one.get(name, 0) for one in records))
        },
        **merge_other_text(records),
        "parts": parts,
    }


def refuse_bad_source(manifest: dict, source) -> None:
    """Raises DataError where more than MAX_BAD_FRACTION of the rows cannot be used."""
    unasked = FORGOTTEN, BLOCKED, NOT_DOWNLOADED
    bad = {reason: count for reason, count in manifest["skipped"].items() if reason not in unasked}
    num_bad, num_rows = sum(bad.values()), sum(bad.values()) + manifest["rows_out"]
    if num_bad > MAX_BAD_FRACTION * num_rows:
        reasons = "; ".join(
            f"{reason} {count}, for example {manifest['examples'][reason][0]}" for reason, count in bad.items()
        )
        raise DataError(
            f"{num_bad} of {num_rows} rows of {source} cannot be used: {reasons}; mend the source, then run the same "
            "command again"
        )


def find_rows(data: Path, manifest: dict, wanted: Forgotten, num_workers: int) -> Iterator[tuple[str, dict]]:
    """(path of a part, {row: (entries that name it, its metadata)}) of each part of a manifest."""
    parts = [(part["path"], part.get("source", "")) for part in manifest["parts"]]
    with progress(total=len(parts), desc="searching", unit="part") as bar:
        for (path, _), found in map_unordered(partial(_search, data=data, wanted=wanted), parts, num_workers):
            yield path, found
            bar.update()


def _search(named: tuple[str, str], data: Path, wanted: Forgotten) -> dict[int, tuple[list[str], dict]]:
    found, (path, source) = {}, named
    if not (data / path).exists():  # a killed `ppldm forget` has taken the whole part out
        return found
    with closing(Part(data / path)) as part:
        for row in range(len(part)):
            try:
                _, meta = part.read_fields(row)
            except RowError:
                continue  # `ppldm verify` counts these
            if entries := wanted.covers(meta, source):
                found[row] = entries, meta
    return found
