"""`part_N_stats.csv`: how many samples each shard of a downloaded part has, for trainers that plan their reading by it.

Laws. A line is a finished shard, in the order of the shards' numbers; N is the part's own number. `num_samples` are the
pictures that the shard's `_stats.json` says to be there; the check counts those that are.

    FOLDER/part_1_stats.csv     file_path,num_samples       part_1/00000.tar,8012
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from ...data.formats.sample_files import IMAGE_SUFFIXES
from ...data.formats.tar import read_samples
from ...utils.errors import ConfigError, DataError, PartError
from ...utils.files import read_json_object, write_text
from ...utils.log import progress
from ..download.metadata import natural_key

HEADER = ["file_path", "num_samples"]
DAMAGED = -1  # in place of the samples of a shard that is missing or cannot be read
_TEXTS = ("json", "txt")


def write_stats(folder: Path, prefix: str = "") -> dict[str, dict]:
    """Write the files of all parts; {files, samples} by their paths. prefix: stands before each `file_path`. Raises
    ConfigError, DataError."""
    report = {}
    for part in _list_parts(folder):
        lines = []
        for stats in sorted(part.glob("[0-9]*_stats.json"), key=natural_key):
            shard = _find_shard(part, stats.name.removesuffix("_stats.json"))
            samples = read_json_object(stats, DataError, "download that shard again")["successes"]
            lines.append([str(Path(prefix, shard.relative_to(folder))), samples])
        path, text = folder / f"{part.name}_stats.csv", io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *lines])
        write_text(path, text.getvalue())
        report[str(path)] = {"files": len(lines), "samples": sum(samples for _, samples in lines)}
    return report


def check_stats(folder: Path, prefix: str = "") -> dict[str, dict]:
    """Open every shard that the files name; {files, samples, wrong: {file_path: samples found, or DAMAGED}} by their
    paths. Raises ConfigError where there are none, or one cannot be read as such."""
    paths = sorted(folder.glob("part_*_stats.csv"), key=natural_key)
    if not paths:
        raise ConfigError(f"{folder} has no part_N_stats.csv; write them first: --stats write")
    report = {}
    with progress(desc="checking", unit="shard") as bar:
        for path in paths:
            lines, wrong = list(_read(path)), {}
            for name, samples in lines:
                found = count_samples(folder / Path(name).relative_to(prefix))
                wrong |= {name: found} if found != samples else {}
                bar.update()
            report[str(path)] = {"files": len(lines), "samples": sum(samples for _, samples in lines), "wrong": wrong}
    return report


def count_samples(shard: Path) -> int:
    """The pictures with a caption or metadata that a tar, a folder or a parquet file of img2dataset has; DAMAGED where
    it is missing or cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if shard.is_dir():
            images = (path for path in shard.iterdir() if path.suffix[1:].lower() in IMAGE_SUFFIXES)
            return sum(any(path.with_suffix(f".{text}").exists() for text in _TEXTS) for path in images)
        if shard.suffix == ".parquet":
            return pq.read_table(shard, columns=["status"], partitioning=None)["status"].to_pylist().count("success")
        with open(shard, "rb") as file:
            samples = (own.keys() for _, own in read_samples(file, shard))
            return sum(not (own.isdisjoint(IMAGE_SUFFIXES) or own.isdisjoint(_TEXTS)) for own in samples)
    except (OSError, PartError, pa.ArrowException):
        return DAMAGED


def describe(report: dict[str, dict]) -> str:
    """A line for each file, and one for each shard that is not as it says."""
    lines = []
    for path, one in report.items():
        lines.append(f"{path}: {one['samples']:,} samples in {one['files']:,} shards")
        for name, found in one.get("wrong", {}).items():
            lines.append(f"  {name}: " + ("missing or damaged" if found == DAMAGED else f"{found:,} samples found"))
    return "\n".join(lines)


def _list_parts(folder: Path) -> list[Path]:
    parts = [path for path in sorted(folder.glob("part_*"), key=natural_key) if path.is_dir()]
    if not any(any(part.glob("*_stats.json")) for part in parts):
        raise ConfigError(f"{folder} has no part_1, part_2, … with finished shards; name the folder of a download")
    return parts


def _find_shard(part: Path, name: str) -> Path:
    """Parquet files lie beside tars and folders too, with what is known of their rows."""
    places = (part / f"{name}.tar", part / name, part / f"{name}.parquet")
    return next((path for path in places if path.exists()), places[0])


def _read(path: Path) -> Iterator[tuple[str, int]]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        try:
            if next(reader, None) != HEADER:
                raise ValueError("its first line is another")
            yield from ((name, int(samples)) for name, samples in reader)
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{path} is not a table of {','.join(HEADER)} ({error}); write it again") from error
