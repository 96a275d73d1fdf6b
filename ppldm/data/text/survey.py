"""What a folder of pictures holds for a first training: its pictures, how large they are, and what each is called.

Captions come from the first place that gives most pictures one: a table in the folder (csv, tsv, jsonl, parquet), text
files beside the pictures, or the pictures' names, or of a name that says nothing, as cars/IMG_1234.jpg, the folder's.
Where names are taken, what is said in a file beside a picture still comes before its name.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ...utils.checksums import digest_of
from ...utils.errors import ConfigError, DataError, FilelistError, PpldmError
from ...utils.files import cache_dir, make_output_dir, meant_path, read_small, write_text
from ...utils.log import get_logger
from ...utils.processes.workers import map_in_threads
from ...utils.text import count_of
from ..formats.base import read_image_size
from ..formats.csv_table import CAPTION_COLUMNS, IMAGE_COLUMNS, find_image, read_records
from ..formats.folder import (
    CAPTION_KEYS,
    IMAGE_SUFFIXES,
    PICTURE_SUFFIXES,
    decode_caption,
    decode_meta,
    entries_of,
    find_caption,
    list_pictures,
    split_name,
)
from ..formats.row import find_name
from ..formats.tar import read_class_prompts

WAYS = {"table": "the table {table}", "files": "files beside the pictures", "names": "the pictures' names",
        "mixed": "files beside some pictures, and the names of the others"}  # fmt: skip
_MEASURED = 400  # pictures whose sizes are looked at, evenly spread
# Each in a folder that a drawing, a training or a quickstart has written.
_OUTPUT_FILES = ("pictures.jsonl", "run.json", ".done")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
RESOLUTIONS = (64, 48, 32)  # that the preset ldm-tiny-cpu draws in some minutes
_SHARE_TAKEN = 0.8  # of the pictures; smaller ones are left out
_LEAST_UPDATES, _UPDATES_A_PICTURE, _MOST_UPDATES = 1400, 4, 6000
_CAMERAS_WORDS = """
img image images dsc dscn dscf dscim pxl mvimg pict pic picture photo foto screenshot screen shot bildschirmfoto
whatsapp wechat mmexport signal untitled unnamed scan copy kopie of from at on am pm hdr pano burst frame gopr dji
snapshot wa vid thumb thumbnail original download file tmp test train sample id no nr 图片 照片 副本 微信图片 屏幕截图
"""
_SAYS_NOTHING = frozenset(_CAMERAS_WORDS.split())
_MOST_CANDIDATES = 2000  # captions, of which prompts are chosen
_HEX = re.compile(r"(?=.*\d)[0-9a-f]{8,}", re.IGNORECASE)


@dataclass(frozen=True)
class Survey:
    """way: of WAYS. captions: of the pictures that have one, by path, sorted. files: all that was looked at.
    without: pictures that have none. lost: what a table names and is not there. sides: the shorter sides of some
    pictures, in pixels; 0 of damaged ones."""

    folder: Path
    way: str
    table: Path | None
    captions: dict[Path, str]
    files: tuple[Path, ...]
    without: tuple[Path, ...]
    sides: dict[Path, int]
    lost: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Lines that say where captions are from, with three of them."""
        where = WAYS[self.way].format(table=self.table and self.table.name)
        where += " (few: 20 or more teach more)" * (len(self.captions) < 20)
        damaged = [path for path, side in self.sides.items() if not side]
        shown = spread([path for path in self.captions if self.sides.get(path, 1)], 3)
        lines = [f"{count_of(len(self.captions), 'picture')} with captions from {where}:"]
        lines += [f"  {path.relative_to(self.folder)}: {self.captions[path][:100]}" for path in shown]
        bare = [path for path in self.without if self.sides.get(path, 1)]
        for why, those in (("no caption", bare), (f"damaged, of {len(self.sides)} looked at", damaged)):
            if those:
                lines.append(f"{why}: {count_of(len(those), 'picture')} left out, such as {those[0]}")
        if self.lost:
            lines.append(f"named in {self.table.name}, and not there: {len(self.lost)}, such as {self.lost[0]}")
        return lines

    def prompts(self, count: int) -> list[str]:
        """So many different captions, or all: each the one of whose words the largest share is new."""
        from .tokenizer import count_words

        different = list(dict.fromkeys(self.captions.values()))
        candidates = [*dict.fromkeys([*spread(different, count), *different[:_MOST_CANDIDATES]])]
        words = {caption: count_words([caption]).keys() for caption in candidates}
        chosen, seen = [], set()
        while candidates and len(chosen) < count:
            best = max(candidates, key=lambda one: len(words[one] - seen) / max(1, len(words[one])))  # the first such
            candidates.remove(best)
            chosen.append(best)
            seen |= words[best]
        return chosen

    @property
    def resolution(self) -> int:
        """The largest of RESOLUTIONS that most of the pictures have. Raises DataError."""
        for side in RESOLUTIONS:
            if sum(one >= side for one in self.sides.values()) >= _SHARE_TAKEN * len(self.sides):
                return side
        raise DataError(f"most pictures of {self.folder} have a side under {RESOLUTIONS[-1]} pixels; take larger ones")

    @property
    def num_updates(self) -> int:
        """Of the preset ldm-tiny-cpu, after which it draws the captions of so many pictures."""
        return max(_LEAST_UPDATES, min(_MOST_UPDATES, _UPDATES_A_PICTURE * len(self.captions)))

    def count_rows(self, resolution: int) -> int:
        """How many pictures can be trained on at a resolution, by those whose sides are known."""
        return len(self.captions) * sum(side >= resolution for side in self.sides.values()) // len(self.sides)

    def table_text(self) -> str:
        """Pictures and captions as a table of `format=csv`."""
        return _table_text(("dir", "text"), ((str(path.absolute()), one) for path, one in self.captions.items()))


def survey(folder, flag: str = "--pictures") -> Survey:
    """Look at a folder that `flag` named. Raises ConfigError, and DataError for pictures of no use as they are."""
    folder = Path(folder).expanduser()
    pictures = _list(folder, flag)
    looked_at = spread(pictures, _MEASURED)
    sizes = map_in_threads(read_image_size, looked_at, "looking at pictures")
    sides = dict(zip(looked_at, map(min, sizes), strict=True))
    bad = [path for path, side in sides.items() if not side]
    if 2 * len(bad) > len(sides):
        raise DataError(f"{flag} {folder}: {bad[0].name} and {len(bad) - 1} more of {len(sides)} pictures cannot be "
                        "read; save them again as JPEG or PNG")  # fmt: skip
    described: set[Path] = set()
    for way, table, captions, files, lost in _ways(folder, pictures):
        described |= captions.keys()
        if 2 * len(captions) >= len(pictures):
            without = tuple(path for path in pictures if path not in captions)
            found = {path: captions[path] for path in pictures if path in captions}
            return Survey(folder, way, table, found, (*pictures, *files), without, sides, lost)
    example = next(path for path in pictures if path not in described).relative_to(folder)
    remedy = f"write one into {example.with_suffix('.txt')}, or all into metadata.csv under the line file_name,text"
    if tables := _tables(folder):
        remedy = f"each line of {tables[0]} should have a picture and its caption, and the first one file_name,text"
    elif above := _table_above(folder, pictures):
        remedy = f"{above} names them: give {flag} {above.parent}"
    raise DataError(
        f"{flag} {folder}: most of its {len(pictures)} pictures have no caption, and names such as {example} say "
        f"nothing; {remedy}"
    )


def _table_above(folder: Path, pictures: list[Path]) -> Path | None:
    """A table one folder up that has captions of most pictures."""
    for table in _tables(folder.absolute().parent):
        with suppress(PpldmError, OSError):
            if 2 * len(_read_table(table, [path.absolute() for path in pictures])[0]) >= len(pictures):
                return table
    return None


def has_captions_beside(folders: list[Path]) -> bool:
    """Whether most pictures have captions beside them, by a thousand names of three folders. Raises OSError."""
    names = (one / name for one in folders[:3] for name, _ in islice(entries_of(one), 1000))
    found = [find_text(path) is not None for path in names if split_name(path.name)[1] in IMAGE_SUFFIXES]
    return 0 < len(found) <= 2 * sum(found)


def write_table(folder: Path) -> Path:
    """The table of a folder's captions in the cache, the same file while they are the same. Raises FilelistError."""
    try:
        found = survey(folder, "the folder")
    except PpldmError as error:
        raise FilelistError(str(error)) from error
    return _keep_table(found.table_text(), found.describe)


def write_class_table(folder: Path, idx_to_prompt: Path) -> Path:
    """The same of pictures in folders by class, of which the file `idx_to_prompt` has the captions: by a folder's name,
    or if that lacks some of these names, by its number among all of them, sorted; a caption in a file beside a picture
    comes before that. Raises ConfigError."""
    prompts, by_class = read_class_prompts(str(idx_to_prompt)), dict[str, list[Path]]()
    for picture in list_pictures(folder):
        by_class.setdefault(picture.relative_to(folder).parts[0], []).append(picture)
    numbers = {name: name for name in by_class}
    if not by_class.keys() <= prompts.keys():
        numbers = dict(zip(sorted(by_class), map(str, range(len(prompts))), strict=False))
        if len(by_class) != len(prompts) or not prompts.keys() <= {*numbers.values()}:
            odd = min(by_class.keys() - prompts.keys())
            raise ConfigError(
                f"{folder} has {odd}, which is no class of {idx_to_prompt}, and {len(by_class)} folders where that has "
                f"{len(prompts)} classes; name folders by class, or give the folders of all classes"
            )
    rows = [(str(path.absolute()), caption_beside(path) or prompts[numbers[name]], name)
            for name in sorted(by_class) for path in by_class[name]]  # fmt: skip
    first = ", ".join(f"{name} is {prompts[numbers[name]]!r}" for name in sorted(by_class)[:3])
    return _keep_table(_table_text(("dir", "text", "class"), rows), lambda: [f"captions by class: {first}, …"])


def _table_text(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows((header, *rows))
    return file.getvalue()


def _keep_table(text: str, describe: Callable[[], list[str]]) -> Path:
    path = cache_dir() / f"{digest_of(text)[:16]}-captions.csv"
    if not path.is_file():
        get_logger().info("\n".join(describe()))
        make_output_dir(path.parent)
        write_text(path, text, names=True)
    return path


def caption_of_name(name: str) -> str:
    """The words of a base name: "red_car_03" is "red car"; empty where it says nothing, as "IMG_1234"."""
    words = []
    for piece in re.split(r"[^\w'’]+|_", name):
        word = piece.strip("0123456789")
        is_letter = len(word) < 2 and word.isascii() and word != piece
        if word and not (is_letter or _HEX.fullmatch(piece) or re.search(r"\d", word)):
            words.append(word)
    says = any(word.casefold() not in _SAYS_NOTHING and (len(word) > 1 or not word.isascii()) for word in words)
    return " ".join(words) if says else ""


def _list(folder: Path, flag: str) -> list[Path]:
    """The pictures of a folder, without what ppldm has written below it. Raises ConfigError."""
    try:
        pictures = list_pictures(folder)
        below = {one for path in pictures for one in path.parents if folder in one.parents}
        outputs = sorted(one for one in below if any((one / name).exists() for name in _OUTPUT_FILES))
        if outputs:
            get_logger().info("passing over pictures that ppldm has written: %s", ", ".join(map(str, outputs)))
        pictures = [path for path in pictures if not {*outputs} & {*path.parents}]
        names = [name for name, is_folder in entries_of(folder) if not is_folder]
    except OSError as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ConfigError(f"{flag} {folder} {what}; {meant_path(folder, 'name a folder of pictures')}") from error
    packed = [name for name in names if name.endswith((".tar", ".parquet", ".mds", ".gz"))]
    if packed and not pictures:
        raise ConfigError(f"{flag} {folder} holds no pictures but {packed[0]}; make parts by `ppldm convert {folder} "
                          "--out DIR` and train on these by --file_list DIR")  # fmt: skip
    if len(pictures) < 2:
        unread = list_pictures(folder, PICTURE_SUFFIXES)
        other = f"; {unread[0].name} is of a kind that is not read, save it as JPEG" if len(unread) > 1 else ""
        found = f"only {pictures[0].name}" if pictures else "no pictures"
        raise ConfigError(f"{flag} {folder} holds {found} ({', '.join(IMAGE_SUFFIXES)}){other}; give 20 or more")
    return pictures


def _ways(folder: Path, pictures: list[Path]) -> Iterator[tuple[str, Path | None, dict, list[Path], tuple]]:
    """(one of WAYS, the table, captions by picture, files that they are in, names in these without a picture) of each
    way there is."""
    for table in sorted(_tables(folder), key=lambda path: (path.stem != "metadata", path)):
        captions, lost = _read_table(table, pictures)
        yield "table", table, captions, [table], lost
    texts = [*filter(None, map(find_text, pictures))]
    beside = dict(zip(pictures, map_in_threads(caption_beside, pictures, "reading captions"), strict=True))
    yield "files", None, {path: caption for path, caption in beside.items() if caption}, texts, ()
    named = {path: beside[path] or caption_of_name(path.stem)
             or caption_of_name(path.parent.name) * (path.parent != folder) for path in pictures}  # fmt: skip
    way = "mixed" if any(beside.values()) else "names"
    yield way, None, {path: caption for path, caption in named.items() if caption}, texts, ()


def _tables(folder: Path) -> list[Path]:
    return [folder / name for name, is_folder in entries_of(folder) if not is_folder and name.endswith(_TABLES)]


def find_text(picture: Path) -> Path | None:
    """The file beside a picture that may hold its caption."""
    return find_caption(picture) or next(filter(Path.is_file, [picture.with_suffix(".json")]), None)


def caption_beside(picture: Path) -> str:
    """What the file beside a picture says; empty where there is none, or no text in it."""
    path = find_text(picture)
    with suppress(PpldmError):  # the conversion counts it, with its reason
        if path and path.suffix != ".json":
            return decode_caption(read_small(path, DataError), path.name)
        meta = decode_meta(read_small(path, DataError), path.name) if path else {}
        name = find_name({name for name, value in meta.items() if isinstance(value, str)}, CAPTION_KEYS)
        return " ".join(meta[name].split()) if name else ""
    return ""


def _read_table(table: Path, pictures: list[Path]) -> tuple[dict[Path, str], tuple[str, ...]]:
    """(the captions of a table by the picture that each line names, the names for which there is no picture). A picture
    is named by its path, or by a name that only one has. Of two columns with other names than usual, as in another
    language, one names pictures, and the other has the captions."""
    known: dict[str, Path | None] = {}
    for path in pictures:
        for name in (path.name, path.stem):
            known[name] = None if name in known else path
    for path in pictures:
        known[str(path.absolute())] = known[str(path.relative_to(table.parent))] = path
    captions, lost = {}, []
    for values in _records(table, known):
        name = find_image(values) or next((one for one in values.values() if isinstance(one, str) and one in known), "")
        others = [column for column in values if values[column] != name]
        column = find_name(list(values), CAPTION_COLUMNS) or (others[0] if len(values) == 2 and others else None)
        picture = known.get(name.removeprefix("./"))
        if picture and column and (caption := " ".join(str(values[column] or "").split())):
            captions[picture] = caption
        elif name and name.removeprefix("./") not in known:
            lost.append(name)
    return captions, tuple(lost)


def _records(table: Path, known) -> Iterator[dict]:
    """The lines of a table, values by column; none of one that is not of its kind. A first line that names a picture of
    `known` is no header: the picture's name stands first, the caption second."""
    try:
        if table.suffix == ".parquet":
            import pyarrow.parquet as pq

            file = pq.ParquetFile(table)
            texts = [field.name for field in file.schema_arrow if str(field.type) in ("string", "large_string")]
            for batch in file.iter_batches(columns=texts):
                yield from batch.to_pylist()
            return
        with open(table, "rb") as lines:
            if table.suffix in (".jsonl", ".ndjson"):
                yield from (decode_meta(line, table.name) for line in lines if line.strip())
                return
            records = (fields for _, _, fields in read_records(lines, table))
            columns = next(records, [])
            if columns and columns[0] in known:
                yield {IMAGE_COLUMNS[0]: columns[0], CAPTION_COLUMNS[0]: ", ".join(columns[1:])}
                columns = [IMAGE_COLUMNS[0], CAPTION_COLUMNS[0]]
            yield from (dict(zip(columns, fields, strict=False)) for fields in records)
    except (PpldmError, OSError, ValueError) as error:
        raise ConfigError(f"cannot read the table {table} ({error}); mend it, or move it out of the folder") from error


def spread(items: list, count: int) -> list:
    """So many of a list, or all, evenly."""
    return [items[number * len(items) // count] for number in range(count)] if count < len(items) else list(items)
