"""What `ppldm precompute` is asked for, latents of pictures or embeddings of captions: which files of which parts, how
large, and what is left to do. A request, opened with a part, gives what the part's files are made of."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from ..config.data import EAGER
from ..data.cached.file import CachedFile, cached_path, count_file_bytes, read_texts, unfinished_path
from ..data.cached.key import CacheKey, EmbeddingsKey, LatentsKey
from ..data.filelist import Source
from ..data.formats.open import open_part
from ..data.formats.row import Rows
from ..data.images import CropRule
from ..data.select.expression import Expression
from ..data.select.selection import Selection, select_rows
from ..data.shapes import ShapeRule
from ..data.text.captions import CaptionRule
from ..utils.errors import ConfigError, DiskFullError, PartError, RowError
from ..utils.files import count_free_bytes

MOST_TEXTS = 250  # of a row
MOST_IN_GROUP = 64  # rows of one shape, as many as a device's batch has: bounds what rows of rare shapes cost
_ROWS_AHEAD = 64  # decoded and waiting, at least
Shapes = tuple[tuple[int, int], ...]  # (height, width) in pixels
Texts = list[list[str] | RowError]  # of each row, or why it has none
Estimate = Callable[["Wanted"], tuple[int, int]]  # arrays and bytes of a file


class Encoder(Protocol):
    """A frozen network: at most `batch_size` pictures or captions to their arrays, float32, each the same whatever the
    others are. digest: of all that they depend on. header: what the header of a file says of it. measured: its latents
    have no mean and deviation by channel in its config, which are measured."""

    batch_size: int
    digest: str
    header: dict
    measured: bool

    def __call__(self, inputs, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Cell:
    """An array of a file. what: its crop or text, or why it cannot be made. shape: of the picture; a batch has one."""

    file: CachedFile
    row: int
    variant: int
    what: Any
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """A file of a part. rows: the numbers of the rows wanted, int64; codes: of their shapes, uint8."""

    path: Path
    key: CacheKey
    rows: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Those of both kinds. model: folder or name of the network. dtype: of what is kept. Of a kind, name: in the
    report; things: what is encoded, in words; flag: by which training uses it."""

    name: ClassVar[str]
    things: ClassVar[str]
    flag: ClassVar[str]

    model: str
    dtype: str = "float16"
    batch_size: int = 16
    offline: bool = False
    engine: str = EAGER


@dataclass(frozen=True, kw_only=True)
class LatentsRequest(_Settings):
    """Latents of pictures by a VAE, or by an EfficientNet in a folder. crops: of each row."""

    name = ""
    things = "crops"
    flag = "--latents cached"

    crops: CropRule

    def load(self) -> Encoder:
        """What encodes; from here on this process computes exactly. Raises ModelError, ConfigError."""
        from .encoders import load_picture_encoder

        return load_picture_encoder(self)

    def choose(self, encoder: Encoder, shapes: list[Shapes], selected: list, num_rows: int) -> list:
        """Key, rows and codes of each file of a part of `num_rows`: one for each of `shapes`, without rows that an
        earlier one has in the same shape. selected: (rows, codes) at each of `shapes`. Raises ConfigError."""
        made, files, factor = np.empty(0, np.int64), [], encoder.header["factor"]
        for own, (rows, codes) in zip(shapes, selected, strict=True):
            for height, width in own:
                if height % factor or width % factor:
                    raise ConfigError(
                        f"pictures of {width} x {height} cannot be encoded; --resolutions and --buckets must be "
                        f"multiples of {factor}, the VAE's downscaling factor"
                    )
            cells = rows << 32 | np.array([height << 16 | width for height, width in own], np.int64)[codes]
            new = ~np.isin(cells, made)
            made = np.concatenate([made, cells])
            files.append((LatentsKey.of(encoder.digest, own, self.crops, self.dtype), rows[new], codes[new]))
        return files

    def open(self, part: Rows, encoder: Encoder) -> "PartPictures":
        """What the files of a part are made of."""
        engine = {"engine": self.engine} if self.engine != EAGER else {}
        return PartPictures(part, self.crops, {**encoder.header, **engine})

    def measure(self, task: "Task", encoder: Encoder, pool: Executor) -> tuple[list[float], Estimate]:
        """(seconds of an array of each file, how much a file is), about, by the first rows of a part."""
        rows, seconds = np.unique(np.concatenate([file.rows for file in task.files]))[: self.batch_size].tolist(), []
        with closing(open_part(task.path, task.source)) as part:
            pictures, texts = self.open(part, encoder), read_texts(part, rows)
            for shape, *_ in [file.key.shapes for file in task.files]:
                cells = [Cell(None, row, 0, self.crops.list_variants()[0], shape) for row in rows]
                pixels = np.zeros((self.batch_size, 3, *shape), np.uint8)
                for _ in range(2):  # the first time is slower
                    began = time.monotonic()
                    deque(pictures.load(cells, pool), maxlen=0)
                    encoder(pixels)
                seconds.append((time.monotonic() - began) / len(rows))
        text_bytes = sum(map(len, texts)) / len(texts)

        def estimate(file: Wanted) -> tuple[int, int]:
            cells = file.key.cells(encoder.header)
            return len(file.codes) * cells.variants, count_file_bytes(cells, self.dtype, file.codes, text_bytes)

        return seconds, estimate


class PartPictures:
    """What the latents of a part are made of. `header`, `sizes`, `texts`: what `create_file` takes."""

    def __init__(self, part: Rows, crops: CropRule, header: dict):
        self._part, self._crops, self.header = part, crops, header
        self.sizes = np.stack([part.widths, part.heights])

    @cached_property
    def texts(self) -> list[bytes]:
        return read_texts(self._part)

    def find_codes(self, key: LatentsKey) -> np.ndarray:
        return key.find_codes(*self.sizes)

    def list_cells(self, file: CachedFile, rows: np.ndarray) -> Iterator[Cell]:
        """The arrays of these rows, row by row."""
        crops = [*enumerate(self._crops.list_variants())]
        for row in rows.tolist():
            shape = file.key.shapes[file.codes[row]]
            yield from (Cell(file, row, variant, crop, shape) for variant, crop in crops)

    def load(self, cells: list[Cell], pool: Executor) -> Iterator[tuple[Cell, np.ndarray | RowError]]:
        """(cell, its pixels or why there are none), one shape after another; the pool decodes some rows ahead."""
        of_row, waiting = defaultdict(list), deque()
        for cell in cells:
            of_row[cell.row].append(cell)
        for row, own in sorted(of_row.items(), key=lambda one: ([cell.shape for cell in one[1]], one[0])):
            try:
                waiting.append(pool.submit(self._cut, self._part.read(row).image, own).result)
            except RowError as error:
                waiting.append(partial(list, [(cell, error) for cell in own]))
            if len(waiting) > _ROWS_AHEAD:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()

    def _cut(self, image: bytes, cells: list[Cell]) -> list[tuple[Cell, np.ndarray | RowError]]:
        try:
            decoded = self._crops.decode(image)
        except RowError as error:
            return [(cell, error) for cell in cells]
        found = []
        for cell in cells:
            pixels: np.ndarray | RowError = np.empty((3, *cell.shape), np.uint8)
            try:
                self._crops.cut(decoded, cell.what, cell.row, pixels)
            except RowError as error:
                pixels = error
            found.append((cell, pixels))
        return found


@dataclass(frozen=True, kw_only=True)
class EmbeddingsRequest(_Settings):
    """Embeddings of captions. tokenizer: by default the one in or beside the model. Others: of `EmbeddingsKey`."""

    name = "text_embeddings"
    things = "captions"
    flag = "--text_embeddings cached"

    tokenizer: str | None = None
    model_max_length: int
    mask_pad_tokens: bool = False
    text_projection: bool = False
    omitted_text_encoders: tuple[str, ...] = ()
    text_encoder_3_max_length: int = 256
    captions: CaptionRule = CaptionRule()  # noqa: RUF009 (frozen)

    def load(self) -> Encoder:
        from .encoders import load_text_encoder

        return load_text_encoder(self)

    def choose(self, encoder, shapes: list[Shapes], selected: list, num_rows: int) -> list:
        """One file: of rows that are selected at any of the shapes, and behind the last of a part the empty caption."""
        rows = np.unique(np.concatenate([rows for rows, _ in selected]))
        rows = np.append(rows, num_rows) if len(rows) else rows
        return [(encoder.key.with_captions(self.captions), rows, np.zeros(len(rows), np.uint8))]

    def open(self, part: Rows, encoder: Encoder) -> "PartCaptions":
        return PartCaptions(read_captions(part, self.captions), encoder.header["width"])

    def measure(self, task: "Task", encoder: Encoder, pool: Executor) -> tuple[list[float], Estimate]:
        """(seconds of a caption, how much a file is), about, by the first rows of a part."""
        with closing(open_part(task.path, task.source)) as part:
            texts = read_captions(part, self.captions, task.files[0].rows[:-1][: self.batch_size].tolist())
        for _ in range(2):  # the first time is slower
            began = time.monotonic()
            encoder([""])
        seconds = (time.monotonic() - began) / self.batch_size
        texts_a_row = float(np.mean([0 if isinstance(one, RowError) else len(one) for one in texts]))

        def estimate(file: Wanted) -> tuple[int, int]:
            """Of rows that are not wanted there is nothing."""
            count = round((len(file.rows) - 1) * texts_a_row) + 1
            cells = file.key.cells({**encoder.header, "variants": 1})
            return count, count_file_bytes(cells, self.dtype, np.ones(count, np.uint8), 0)

        return [seconds], estimate


class PartCaptions:
    """As PartPictures, of embeddings: the texts of rows, and the empty caption. Raises PartError."""

    def __init__(self, captions: Texts, width: int):
        self._captions = [*captions, [""]]
        counts = [0 if isinstance(one, RowError) else len(one) for one in self._captions]
        if max(counts) > MOST_TEXTS:
            raise PartError(
                f"row {int(np.argmax(counts))} has {max(counts)} captions, and embeddings are for {MOST_TEXTS} at "
                "most; choose the first with --caption_choice first"
            )
        self._codes, self.header = np.array(counts, np.uint8), {"width": width, "variants": max(counts)}
        self.sizes, self.texts = np.zeros((2, len(counts))), [b""] * len(counts)

    def find_codes(self, key: EmbeddingsKey) -> np.ndarray:
        return self._codes

    def list_cells(self, file: CachedFile, rows: np.ndarray) -> Iterator[Cell]:
        for row in rows.tolist():
            texts = self._captions[row]
            found = [texts] if isinstance(texts, RowError) else texts
            yield from (Cell(file, row, place, text) for place, text in enumerate(found))

    def load(self, cells: list[Cell], pool: Executor) -> Iterator[tuple[Cell, str | RowError]]:
        return ((cell, cell.what) for cell in cells)


def read_captions(part: Rows, rule: CaptionRule, rows: Iterable[int] | None = None) -> Texts:
    """The texts that may be drawn of rows of a part, None for all."""
    found: Texts = []
    for number in range(len(part)) if rows is None else rows:
        try:
            row = part.read(number)
            rule.check(row)
            found.append(rule.texts(row))
        except RowError as error:
            found.append(error)
    return found


Request = LatentsRequest | EmbeddingsRequest
Contents = PartPictures | PartCaptions


@dataclass(frozen=True)
class Task:
    """The files of a part, also those of which no rows are wanted. content: bytes and CRC-32 of the part."""

    request: Request
    digest: str
    path: Path
    source: Source
    content: tuple[int, int]
    files: tuple[Wanted, ...]

    @property
    def num_rows(self) -> int:
        """How many are wanted, in all files."""
        return sum(len(file.rows) for file in self.files)


@dataclass(frozen=True)
class Plan:
    """The tasks of a request."""

    request: Request
    encoder: Encoder
    tasks: list[Task]


def choose_rows(
    sources: list[Source], condition: Expression | None, sizes: list[int | ShapeRule], num_workers: int
) -> list[tuple[Shapes, Selection]]:
    """For each of `sizes`, sides of squares in pixels or rules of buckets, the shapes and the rows that training has at
    that size. A rule of no group size stands for those of all groups up to MOST_IN_GROUP. Raises DataError."""
    chosen: list[tuple[Shapes, Selection]] = []
    for size in sizes:
        if isinstance(size, int):
            chosen.append((((size, size),), select_rows(sources, condition, size, num_workers)))
            continue
        group_size = size.group_size or 1
        while True:
            selection = select_rows(sources, condition, 0, num_workers, replace(size, group_size=group_size))
            chosen.append((tuple(selection.buckets.shapes), selection))
            # The least group for which another shape is too rare.
            group_size = min(selection.buckets.rows) + 1
            if size.group_size or group_size > MOST_IN_GROUP or len(selection.buckets.shapes) == 1:
                break
    return chosen


def make_plan(
    request: Request,
    encoder: Encoder,
    sources: list[Source],
    chosen: list[tuple[Shapes, Selection]],
    folder: Path | None,
) -> Plan:
    """Tasks for all parts with `chosen` rows. folder: of the files; None: beside the parts. Raises ConfigError."""
    shapes, selections = zip(*chosen, strict=True)
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    num_rows, tasks = np.diff(selections[0].starts).tolist(), []
    for number, ((path, source), content) in enumerate(zip(parts, selections[0].contents, strict=True)):
        files = []
        selected = [one.rows_of(number) for one in selections]
        for key, rows, codes in request.choose(encoder, shapes, selected, num_rows[number]):
            key = key.of_part(source, content)
            files.append(Wanted(cached_path(path, key, folder), key, rows, codes))
        tasks.append(Task(request, encoder.digest, path, source, content, tuple(files)))
    return Plan(request, encoder, [task for task in tasks if task.num_rows])


@dataclass(frozen=True)
class Projection:
    """How much a plan is. finished: of the files. cells, seconds: of each file of a part, how many arrays are missing,
    and how long one takes. needed: the folder of each missing file, and the bytes that it will take more than now."""

    files: int
    finished: int
    cells: list[int]
    seconds: list[float]
    needed: list[tuple[Path, int]]


def project(plan: Plan, pool: Executor) -> Projection:
    """How much a plan is, by the first rows of its first part. Files that are there are taken for finished."""
    seconds, estimate = plan.request.measure(plan.tasks[0], plan.encoder, pool)
    own = [each for task in plan.tasks for each in enumerate(task.files) if len(each[1].rows)]
    absent = [(number, file.path, *estimate(file)) for number, file in own if not file.path.exists()]
    cells = [sum(count for of, _, count, _ in absent if of == number) for number in range(len(seconds))]
    needed = []
    for _, path, _, size in absent:
        with suppress(FileNotFoundError):
            size -= unfinished_path(path).stat().st_blocks * 512
        needed.append((path.parent, max(0, size)))
    return Projection(len(own), len(own) - len(absent), cells, seconds, needed)


def check_disks(projections: list[Projection]) -> None:
    """Raises DiskFullError where files do not fit where they should go."""
    needed, folders = defaultdict(int), {}
    for folder, size in [each for one in projections for each in one.needed]:
        device = folder.stat().st_dev
        folders[device] = folder
        needed[device] += size
    for device, size in needed.items():
        free = count_free_bytes(folders[device])
        if size > free:
            raise DiskFullError(
                f"that needs {size / 1e9:.3f} GB, and {folders[device]} has {free / 1e9:.3f} GB free; free some, "
                "choose another --latents-dir, or a smaller --dtype or fewer --crops"
            )
