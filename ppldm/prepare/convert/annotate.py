"""`ppldm annotate`: CSV files of picture and caption beside folders that img2dataset made.

Laws. Pictures = lines + pictures skipped, by reason. A line is a file that is there, with the caption of its row.
Captions are quoted as CSV asks (RFC 4180): commas, quotes and line breaks, a carriage return alone among them, come
back as they were from any reader. Two things have no place in CSV files: NUL, where some readers cut the text and
others give up, is written as U+FFFD; a lone surrogate, which UTF-8 does not have, as "?".

    FOLDER/part_1.csv                   dir,text        dir is relative to FOLDER: part_1/00000/000000000.jpg,
                                                        with --folder-prefix P, P/part_1/00000/000000000.jpg
    FOLDER/part_1/00000.csv             with --save-csv-per-img-folder, the same for each shard
    FOLDER/part_1_stats.csv             with --stats, and nothing else: file_path,num_samples
    FOLDER/NAME.csv                     where the shards lie in FOLDER itself, NAME being that of FOLDER

`part_N_stats.csv` says how many samples each shard of a downloaded part has, for trainers that plan their reading by
it. A line is a finished shard (part_1/00000.tar,8012), in the order of the shards' numbers; N is the part's own number.
`num_samples` are the pictures that the shard's `_stats.json` says to be there; the check counts those that are.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...data.formats.sample_files import IMAGE_SUFFIXES, decode_caption, decode_meta
from ...data.formats.tar import read_samples
from ...utils.errors import ConfigError, DataError, PartError, RowError
from ...utils.files import atomic_write, local_path, read_json_object, write_text
from ...utils.log import get_logger, progress
from ...utils.report import print_report
from ..place import natural_key

DAMAGED = -1  # in place of the samples of a shard that is missing or cannot be read
_TEXTS = ("json", "txt")
_HEADER = ("dir", "text")
_STATS_HEADER = ["file_path", "num_samples"]
# What makes quotes necessary. Python's csv module before 3.13 does not quote a carriage return alone.
_QUOTED = frozenset(',"\r\n')


def write_stats(folder: Path, prefix: str = "") -> dict[str, dict]:
    """Write the files of all parts; {files, samples} by their paths. prefix: stands before each `file_path`. Raises
    ConfigError, DataError."""
    report = {}
    for part in _list_parts(folder):
        lines = []
        for stats in sorted(part.glob("[0-9]*_stats.json"), key=natural_key):
            shard = _find_shard(part, stats.name.removesuffix("_stats.json"))
            samples = read_json_object(stats, DataError, "download that shard again")["successes"]
            lines.append([Path(prefix, shard.relative_to(folder)), samples])
        path = folder / f"{part.name}_stats.csv"
        write_text(path, "".join(map(_record, [_STATS_HEADER, *lines])))
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


def describe_stats(report: dict[str, dict]) -> str:
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
            if next(reader, None) != _STATS_HEADER:
                raise ValueError("its first line is another")
            yield from ((name, int(samples)) for name, samples in reader)
        except (ValueError, csv.Error) as error:
            raise ConfigError(
                f"{path} is not a table of {','.join(_STATS_HEADER)} ({error}); write it again"
            ) from error


def annotate(
    folder: str,  # folder of part_1, part_2, ..., or of the shards 00000, 00001, ... of one part, in the format `files`
    folder_prefix: str = "",  # put before every dir, such as laion/images for CSV files that are read from elsewhere
    save_csv_per_img_folder: bool = False,  # write a CSV file for each shard, too: part_1/00000.csv
    stats: str = "",  # in place of that: write part_N_stats.csv (file_path, num_samples), or check those that are there
    json: bool = False,  # print the counts as JSON
):
    """Write part_N.csv (dir, text) beside the folders that `ppldm download` or img2dataset made.

    For trainers that read CSV files; `ppldm convert` needs none of them. --stats takes shards of every format.
    """
    if stats:
        return _handle_stats(stats, local_path(folder), folder_prefix, json)
    report = annotate_folder(local_path(folder), save_csv_per_img_folder, folder_prefix)
    print_report(report, _describe, json)
    return report


def _handle_stats(stats: str, folder: Path, prefix: str, as_json: bool) -> dict[str, dict]:
    """Raises ConfigError, DataError where a shard is not as its line says."""
    if stats not in ("write", "check"):
        raise ConfigError(f"--stats {stats} is not known; use write or check")
    report = (write_stats if stats == "write" else check_stats)(folder, prefix)
    print_report(report, describe_stats, as_json)
    if bad := sum(len(one.get("wrong", ())) for one in report.values()):
        raise DataError(f"{bad} shard(s) of {folder} are not as part_N_stats.csv says; download them again")
    return report


def annotate_folder(folder: Path, per_shard: bool = False, folder_prefix: str = "") -> dict[str, dict]:
    """Write the CSV files; return of each path the `pictures`, the `lines` and those `skipped`, by reason.

    `folder_prefix` stands before every `dir`. Raises ConfigError, DataError.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the one that holds part_1, part_2, ...")
    parts = {folder / f"{part.name}.csv": _list_shards(part) for part in sorted(folder.glob("part_*"), key=natural_key)}
    if not any(parts.values()):
        parts = {folder / f"{folder.absolute().name}.csv": _list_shards(folder)}
    if not any(parts.values()):
        raise DataError(
            f"no folders of pictures (00000, 00001, ...) in {folder}; only the output format `files` has them, and "
            "`ppldm convert` takes the other formats without a CSV file"
        )
    report = {}
    with progress(total=sum(map(len, parts.values())), desc="annotate", unit="shard") as bar:
        for path, shards in parts.items():
            counts = Counter()
            with _create(path) as file:
                file.write(_record(_HEADER))
                for shard in shards:
                    rows = [
                        (Path(folder_prefix, image.relative_to(folder)), caption)
                        for image, caption in _read_shard(shard, counts)
                    ]
                    file.writelines(map(_record, rows))
                    if per_shard:
                        with _create(shard.with_name(f"{shard.name}.csv")) as own:
                            own.writelines(map(_record, [_HEADER, *rows]))
                    bar.update()
            pictures, lines = counts.pop("pictures", 0), counts.pop("lines", 0)
            report[str(path)] = {"pictures": pictures, "lines": lines, "skipped": dict(sorted(counts.items()))}
    return report


def _list_shards(part: Path) -> list[Path]:
    """The shards of a part, without those that img2dataset had not finished."""
    shards = sorted(path for path in part.glob("[0-9]*") if path.is_dir() and path.name.isdigit())
    if not any(part.glob("*_stats.json")):
        return shards
    finished = [shard for shard in shards if shard.with_name(f"{shard.name}_stats.json").exists()]
    if len(finished) < len(shards):
        get_logger().warning(
            "%s: %d shard(s) are not finished and left out; finish the download first",
            part,
            len(shards) - len(finished),
        )
    return finished


def _read_shard(shard: Path, counts: Counter):
    """(path, caption) of each picture that has one, in the order of keys."""
    captions = _read_captions(shard)
    for image in sorted(shard.glob("*.jpg")):
        counts["pictures"] += 1
        try:
            caption = captions[image.stem] if image.stem in captions else _read_caption(image)
            if not caption.strip():
                raise RowError("empty_caption", f"{image}: no text")
            str(image).encode()
        except UnicodeEncodeError:  # no CSV file can hold its name
            counts["file_name"] += 1
            continue
        except RowError as error:
            counts[error.reason] += 1
            continue
        counts["lines"] += 1
        yield image, caption
    counts["no_image"] += sum(not Path(shard, f"{key}.jpg").exists() for key in captions)
    counts += Counter()  # without zeros


def _read_captions(shard: Path) -> dict[str, str]:
    """Captions by key of the rows that img2dataset's table says to have a picture; none where there is no table."""
    import pyarrow.parquet as pq

    path = shard.with_name(f"{shard.name}.parquet")
    if not path.exists():
        return {}
    table = pq.read_table(path, columns=["key", "caption", "status"], partitioning=None).to_pylist()
    return {row["key"]: row["caption"] or "" for row in table if row["status"] == "success"}


def _read_caption(image: Path) -> str:
    """The caption in the files beside a picture. Raises RowError."""
    meta, text = image.with_suffix(".json"), image.with_suffix(".txt")
    if meta.exists():
        caption = decode_meta(meta.read_bytes(), str(meta)).get("caption")
        return caption if isinstance(caption, str) else ""
    if text.exists():
        return decode_caption(text.read_bytes(), str(text))
    raise RowError("no_caption", f"{image} has neither .json nor .txt beside it")


def _create(path: Path):
    return atomic_write(path, "w", encoding="utf-8", errors="replace", newline="")


def _record(fields: Iterable) -> str:
    """A line of a CSV file, with its end."""
    texts = (str(field).replace("\0", "\ufffd") for field in fields)
    return ",".join('"' + text.replace('"', '""') + '"' if _QUOTED & set(text) else text for text in texts) + "\n"


def _describe(report: dict[str, dict]) -> str:
    lines = []
    for path, counts in report.items():
        skipped = ", ".join(f"{reason} {count:,}" for reason, count in counts["skipped"].items())
        lines.append(f"{path}: {counts['lines']:,} lines" + (f"; skipped: {skipped}" if skipped else ""))
    return "\n".join(lines)
