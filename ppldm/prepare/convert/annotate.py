"""`ppldm annotate`: CSV files of picture and caption beside folders that img2dataset made.

Laws. Pictures = lines + pictures skipped, by reason. A line is a file that is there, with the caption of its row.
Captions are quoted by RFC 4180; NUL is written as U+FFFD, a lone surrogate as "?".

    FOLDER/part_1.csv           dir,text; dir is relative to FOLDER: part_1/00000/000000000.jpg, after --folder-prefix
    FOLDER/part_1/00000.csv     with --save-csv-per-img-folder, the same for each shard
    FOLDER/NAME.csv             where the shards lie in FOLDER itself, NAME being that of FOLDER
    FOLDER/part_1_stats.csv     with --stats, and nothing else: file_path,num_samples of each finished shard in order;
                                the samples that its `_stats.json` says to be there, which the check counts
"""

import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ...data.formats.folder import IMAGE_SUFFIXES, decode_caption, decode_meta
from ...data.formats.tar import read_samples
from ...utils.errors import ConfigError, DataError, PartError, RowError
from ...utils.files import atomic_write, local_path, read_json_object, write_text
from ...utils.log import get_logger, progress
from ...utils.text import print_report
from ..place import natural_key

DAMAGED = -1  # in place of the samples of a shard that is missing or cannot be read
_TEXTS = ("json", "txt")
_HEADER = ("dir", "text")
_STATS_HEADER = ["file_path", "num_samples"]
_PICTURES = (".jpg", ".png", ".webp")  # as `ppldm download` encodes them
# What makes quotes necessary. Python's csv module before 3.13 does not quote a carriage return alone.
_QUOTED = frozenset(',"\r\n')


def write_stats(folder: Path, prefix: str = "") -> dict[str, dict]:
    """Write the files of all parts; {files, samples} by their paths. Raises ConfigError, DataError."""
    report = {}
    parts = [path for path in sorted(folder.glob("part_*"), key=natural_key) if path.is_dir()]
    if not any(any(part.glob("*_stats.json")) for part in parts):
        raise ConfigError(f"{folder} has no part_1, part_2, … with finished shards; name the folder of a download")
    for part in parts:
        lines = []
        for stats in sorted(part.glob("[0-9]*_stats.json"), key=natural_key):
            name = stats.name.removesuffix("_stats.json")
            # Parquet files lie beside tars and folders too, with what is known of their rows.
            places = (part / f"{name}.tar", part / name, part / f"{name}.parquet")
            shard = next((path for path in places if path.exists()), places[0])
            samples = read_json_object(stats, DataError, "download that shard again")["successes"]
            lines.append([Path(prefix, shard.relative_to(folder)), samples])
        path = folder / f"{part.name}_stats.csv"
        write_text(path, "".join(map(_record, [_STATS_HEADER, *lines])))
        report[str(path)] = {"files": len(lines), "samples": sum(samples for _, samples in lines)}
    return report


def check_stats(folder: Path, prefix: str = "") -> dict[str, dict]:
    """As `write_stats`, with what is `wrong` in each: {file_path: samples found, or DAMAGED}. Raises ConfigError."""
    paths = sorted(folder.glob("part_*_stats.csv"), key=natural_key)
    if not paths:
        raise ConfigError(f"{folder} has no part_N_stats.csv; write them first: --stats write")
    report = {}
    with progress(desc="checking", unit="shard") as bar:
        for path in paths:
            lines, wrong = _read(path), {}
            for name, samples in lines:
                found = count_samples(folder / Path(name).relative_to(prefix))
                wrong |= {name: found} if found != samples else {}
                bar.update()
            report[str(path)] = {"files": len(lines), "samples": sum(samples for _, samples in lines), "wrong": wrong}
    return report


def count_samples(shard: Path) -> int:
    """The pictures with a caption or metadata that a shard of img2dataset has; DAMAGED where it cannot be read."""
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


def _read(path: Path) -> list[tuple[str, int]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        if lines[:1] != [_STATS_HEADER]:
            raise ValueError("its first line is another")
        return [(name, int(samples)) for name, samples in lines[1:]]
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path} is not a table of {','.join(_STATS_HEADER)} ({error}); write it again") from error


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
    if stats not in ("", "write", "check"):
        raise ConfigError(f"--stats {stats} is not known; use write or check")
    if not stats:
        report = annotate_folder(local_path(folder), save_csv_per_img_folder, folder_prefix)
        print_report(report, _describe, json)
        return report
    report = (write_stats if stats == "write" else check_stats)(local_path(folder), folder_prefix)
    print_report(report, describe_stats, json)
    if bad := sum(len(one.get("wrong", ())) for one in report.values()):
        raise DataError(f"{bad} shard(s) of {folder} are not as part_N_stats.csv says; download them again")
    return report


def annotate_folder(folder: Path, per_shard: bool = False, folder_prefix: str = "") -> dict[str, dict]:
    """Write the CSV files; of each path the `pictures`, `lines` and those `skipped`, by reason. Raises PpldmError."""
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
                    found = _read_shard(shard, counts)
                    rows = [(Path(folder_prefix, image.relative_to(folder)), caption) for image, caption in found]
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
    if count := len(shards) - len(finished):
        get_logger().warning("%s: %d shard(s) are not finished and left out; finish the download first", part, count)
    return finished


def _read_shard(shard: Path, counts: Counter):
    """(path, caption) of each picture that has one, in the order of keys."""
    captions = _read_captions(shard)
    images = sorted(path for path in shard.iterdir() if path.suffix in _PICTURES)
    for image in images:
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
    counts["no_image"] += len(captions.keys() - {image.stem for image in images})
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
