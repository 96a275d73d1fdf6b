"""Samples as a function of (epoch, row): what to train on, with every random number that the step will need.

A sample has an array for each of the model's `inputs` (`ppldm.data.inputs`), and

    row_ids          int64 []        the number of the row used, among all rows, selected or not
    checksums        int64 []        CRC-32 of what was read and not drawn: the row's number, pixels and tokens; not the
                                     pixels where latents are cached, for then only some rows have any
    skipped          list of str     the reasons why rows before it were not used

A bad row is replaced by the next good one of its own list and shape in that epoch (`order.Successors`). All draws come
from `make_rng(seed, stream, epoch, row)` with the row asked for, `row` being its number among all rows, so that a bad
row changes no number but its own pixels and caption, and a row is drawn alike whatever else is selected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from isal import isal_zlib

from ..utils.errors import ConfigError, DataError, PpldmError, RowError, describe
from ..utils.rng import Generators, Stream
from .filelist import Fingerprint, Source, take_fingerprint
from .formats.open import OpenParts, count_open_parts
from .formats.row import BadRows, Row
from .images import CropRule, DrawnCrop, place_crop
from .inputs import Control, Input, Moments, Pixels, Sizes, Strata, TextEmbeddings, Tokens, Uncached, count_bytes
from .order import Successors
from .select.selection import Selection, select_rows
from .shapes import BucketIndex
from .text.captions import CaptionRule
from .text.tokenizer import CaptionTokenizer

if TYPE_CHECKING:
    from .cached.run import EmbeddingsRule, LatentsRule


class Pictures:
    """Filled row by row. size: (height, width). whole: rows with moments are black pictures among the others, so that
    what is computed of a row, and kept, does not depend on how many there are."""

    def __init__(
        self, count: int, size: tuple[int, int], moments: Moments | None, whole: bool, control: Control | None
    ):
        # Memory that is not written to takes none.
        self.pixels = (np.zeros if whole else np.empty)((count, *Pixels().shape(*size)), dtype=np.uint8)
        self.size, self._whole = size, whole
        self._moments = None if moments is None else np.zeros((count, *moments.shape(*size)), dtype=np.float32)
        self._uncached: dict[int, tuple[int, int, int]] = {}
        self.sizes = np.zeros((count, 6), np.int64)  # `inputs.Sizes`
        self.control = None if control is None else np.empty((count, *control.shape(*size)), dtype=np.uint8)

    def note(self, place: int, moments: np.ndarray | None, key: tuple[int, int, int]) -> None:
        """The row at `place` in the batch has moments, or pixels. key: its part, its number in that, its variant."""
        self._uncached.pop(place, None)
        if moments is None:
            self._uncached[place] = key
        else:
            self._moments[place] = moments

    def array(self, wanted: Pixels | Moments | Uncached | Control) -> np.ndarray | None:
        """The array of an input; None where the batch has none."""
        if isinstance(wanted, Control):
            return self.control
        if self._moments is None:
            return self.pixels
        if isinstance(wanted, Moments):
            return self._moments
        if not self._uncached:
            return None
        places = sorted(self._uncached)
        if isinstance(wanted, Pixels):
            return self.pixels if self._whole else self.pixels[places]
        return np.array([(place, *self._uncached[place]) for place in places], dtype=np.int64)


class TextImageDataset:
    """The selected rows of all sources, in order: source by source, part by part. `len()` is how many. selection:
    which; None for all. inputs: what a batch holds of them, by name; of pictures of `resolution` pixels a side, or of
    the selection's shapes, of which a batch has one. tokenizer: may be None without `Tokens` among them. latents,
    embeddings: which cached ones serve, for sources that ask for them. `list_sizes`, `weights`, `buckets`: as
    `order.Mix` takes them. Raises PartError, ConfigError."""

    def __init__(
        self,
        sources: list[Source],
        inputs: dict[str, Input],
        resolution: int,
        seed: int,
        tokenizer: CaptionTokenizer | None = None,
        captions: CaptionRule = CaptionRule(),  # noqa: B008 (frozen, as the next two)
        crops: CropRule = CropRule(),  # noqa: B008
        bad_rows: BadRows = BadRows(),  # noqa: B008
        selection: Selection | None = None,
        latents: "LatentsRule | None" = None,
        embeddings: "EmbeddingsRule | None" = None,
    ):
        self.tokenizer, self.seed = tokenizer, seed
        self.captions, self.crops, self.bad_rows = captions, crops, bad_rows
        self.sources = sources
        self.selection = select_rows(sources) if selection is None else selection
        self.list_sizes = self.selection.list_sizes
        weights = [source.weight for source in sources]
        self.weights = None if None in weights else weights
        shaped = self.selection.buckets
        self.buckets = BucketIndex(shaped.shapes, shaped.codes, self.list_sizes) if shaped else None
        self._shapes = shaped.shapes if shaped else [(resolution, resolution)]
        self._successors = Successors(self.list_sizes, self.weights, seed, self.buckets)
        bounds = self.selection.part_bounds
        rows_of_parts = self.buckets.count_between(bounds) if self.buckets else np.diff(bounds)
        parts = [(path, source) for source in sources for path in source.parts]
        count = count_open_parts(rows_of_parts, [len(source.parts) for source in sources], self.weights)
        self._parts = OpenParts(parts, count, self.selection.contents)
        self.latents, self._moments, self._control = None, _find(Moments, inputs), _find(Control, inputs)
        if any(source.latents != "off" for source in sources):
            if self._moments is None or latents is None:
                raise ConfigError("cached latents are for models with a frozen autoencoder; omit --latents")
            from .cached.run import CachedMoments

            self.latents = CachedMoments(latents, self._moments, crops, self._shapes, self._parts, self.selection)
        else:
            inputs = {name: one for name, one in inputs.items() if not isinstance(one, Moments | Uncached)}
        self.embeddings = None
        if embeddings:
            from .cached.run import CachedEmbeddings

            self.embeddings = CachedEmbeddings(embeddings, _find(TextEmbeddings, inputs), captions, self._parts)
        else:
            inputs = {name: one for name, one in inputs.items() if not isinstance(one, TextEmbeddings)}
        self.inputs = inputs
        self._sizes = _find(Sizes, inputs)
        if self._sizes and self.latents and crops.smart:
            raise ConfigError(
                "cached latents do not keep where a smart crop lies; omit --size_conditioning, --smart_crop or "
                "--latents"
            )
        self.sample_bytes = max(count_bytes(inputs, shape) for shape in self._shapes)

    def __len__(self) -> int:
        return len(self.selection)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What all rows of the sources are, selected or not."""
        return take_fingerprint(self.sources, np.diff(self.selection.starts).tolist(), self.selection.contents)

    def read_row(self, row: int) -> Row:
        """Row number `row` of all rows, selected or not. Raises RowError, DataError."""
        with self._naming(row):
            part, number = self._number_in_part(row)
            return self._parts[part].read(number)

    def find_row(self, row: int) -> tuple[Path, int]:
        """The part of row number `row`, and its number in that."""
        part, number = self._number_in_part(row)
        return self._parts.path(part), number

    def __getitem__(self, key: tuple[int, int]) -> dict:
        """The sample of (epoch, place among the selected rows); see the module. Raises DataError."""
        batch = self.make_batch([key])
        return {name: values if name == "skipped" else values[0] for name, values in batch.items()}

    def spread(self, count: int) -> list[int]:
        """At most `count` places, evenly spread over all."""
        return sorted(set(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int).tolist()))

    def shape(self, place: int) -> tuple[int, int]:
        """(height, width) of the pictures of a place, in pixels."""
        return self.buckets.shape(place) if self.buckets else self._shapes[0]

    def split(self, places: list[int], batch_size: int) -> list[list[int]]:
        """Places in batches of at most `batch_size`, each of one shape: those of each shape in the order given."""
        of_shape = {}
        for place in places:
            of_shape.setdefault(self.shape(place), []).append(place)
        return [
            some[start : start + batch_size] for some in of_shape.values() for start in range(0, len(some), batch_size)
        ]

    def make_batch(self, places: list[tuple[int, int]], strata: Strata | None = None) -> dict:
        """The samples of several (epoch, place) of one shape, stacked; `skipped` lists are joined. Raises DataError."""
        (shape,) = {self.shape(place) for _, place in places}
        keys = [(epoch, self.selection[place]) for epoch, place in places]
        cached = (self._moments, self.latents.keeps) if self.latents else (None, False)
        made = Pictures(len(keys), shape, *cached, self._control)
        generators = Generators(self.seed)
        captions, embeddings, used_rows, skipped = [], [], [], []
        for number, ((epoch, place), key) in enumerate(zip(places, keys, strict=True)):
            generator = partial(generators, key=key)
            load = partial(self._load, generator, self.crops.draw(generator), made, number)
            candidates = self._candidates(epoch, place)
            (row, embedded), used_place, reasons = self.bad_rows.load(load, candidates)
            if self.tokenizer:
                captions.append(self.captions.draw(row, generator))
                embeddings.append(embedded)
            used_rows.append(self.selection[used_place])
            skipped += reasons
        batch = {"row_ids": np.array(used_rows, dtype=np.int64), "skipped": skipped}
        for name, wanted in self.inputs.items():
            if isinstance(wanted, Pixels | Moments | Uncached | Control):
                if (array := made.array(wanted)) is not None:
                    batch[name] = array
            elif isinstance(wanted, Sizes):
                batch[name] = wanted.forget(made.sizes, keys, generators)
            elif isinstance(wanted, Tokens):
                batch[name] = self.tokenizer.encode(captions)
            elif isinstance(wanted, TextEmbeddings):
                batch[name] = np.stack(embeddings)
            else:
                batch[name] = wanted.draw(keys, shape, generators, batch, strata)
        batch["checksums"] = self._checksums(batch)
        return batch

    def _checksums(self, batch: dict) -> np.ndarray:
        kinds = (Tokens, Control) if self.latents else (Tokens, Control, Pixels)
        read = [batch["row_ids"], *(batch[name] for name, one in self.inputs.items() if isinstance(one, kinds))]
        crc32 = isal_zlib.crc32
        sums = [reduce(lambda value, array: crc32(array[n], value), read, 0) for n in range(len(batch["row_ids"]))]
        return np.array(sums, dtype=np.int64)

    def _candidates(self, epoch: int, place: int) -> Iterator[int]:
        """A place, and what may stand in for it, which takes longer to find than the sample."""
        yield place
        yield from self._successors.after(epoch, place)

    def _number_in_part(self, row: int) -> tuple[int, int]:
        """(number of a row's part, the row's number in it)."""
        if not 0 <= row < self.selection.num_rows:
            raise IndexError(f"there are rows 0 to {self.selection.num_rows - 1}, no row {row}")
        part = int(np.searchsorted(self.selection.starts, row, side="right")) - 1
        return part, row - int(self.selection.starts[part])

    @contextmanager
    def _naming(self, row: int):
        """Makes of what nobody foresaw, as of a disk that fails, a DataError that names part and number."""
        try:
            yield
        except PpldmError:
            raise
        except Exception as error:
            part, number = self._number_in_part(row)
            raise DataError(
                f"{self._parts.path(part)} row {number} cannot be read: {describe(error)}; see to its storage, and "
                "leave parts and their indexes as they are while a run uses them; the same command goes on"
            ) from error

    def _load(
        self, generator, crop: DrawnCrop, made: Pictures, place_in_batch: int, place: int
    ) -> tuple[Row, np.ndarray | None]:
        """A selected row, whose crop or moments go to `made`; cached embeddings of its caption. Raises RowError."""
        row = self.selection[place]
        with self._naming(row):
            part, number = self._number_in_part(row)
            variant, corner = self.crops.variant(crop), None
            found = self.latents and self.latents.read(part, number, variant, made.size)
            made.note(place_in_batch, found[1] if found else None, (part, number, variant))
            if found:
                loaded = found[0]
            if not found or self._control:
                # Beside moments the picture is there for its control image alone.
                pixels = np.empty_like(made.pixels[0]) if found else made.pixels[place_in_batch]
                loaded, corner, size = self._load_pixels(part, number, crop, pixels)
            if self._sizes:
                made.sizes[place_in_batch] = self._measure(part, number, crop, corner, made.size)
            try:
                if self._control:
                    from .control import Cut, make_control

                    cut, draws = Cut(size, corner, crop.mirrored), generator(Stream.CONTROL)
                    control = make_control(self._control.filter, loaded, pixels, cut, self.crops, draws)
                    made.control[place_in_batch] = control
                if self.tokenizer:
                    self.captions.check(loaded)
            except RowError as error:
                raise RowError(error.reason, f"{self._parts.path(part)} row {number}: {error}") from error
            if self.embeddings is None:
                return loaded, None
            return loaded, self.embeddings.read(part, number, self.captions.draw_place(loaded, generator))

    def _measure(self, part: int, number: int, crop: DrawnCrop, corner, shape: tuple[int, int]) -> tuple[int, ...]:
        """The `Sizes` of a row, from the index, so that caches change nothing; a smart crop's corner is its pixels'."""
        rows = self._parts[part]
        picture = int(rows.heights[number]), int(rows.widths[number])
        if not all(picture):
            return (0,) * 6
        drawn = None if self.crops.smart else self.crops.find_corner(crop, number)
        (width, _), placed = place_crop(picture, shape, self.crops.fraction, drawn)
        top, left = corner if self.crops.smart else placed
        if self._sizes.as_seen and crop.mirrored:
            left = width - shape[1] - left
        return (*picture, top, left, *shape)

    def _load_pixels(
        self, part: int, number: int, crop: DrawnCrop, pixels: np.ndarray
    ) -> tuple[Row, tuple[int, int], tuple[int, int]]:
        """(row, (top, left) of its crop, (height, width) of its picture); fills `pixels`. Raises RowError."""
        rows = self._parts[part]
        try:
            loaded = rows.read(number)
            if not loaded.image:
                remedy = "say latents=cached of its list of filelists"
                if self._control:
                    remedy = "control images are made of pictures, so these must be there too"
                raise DataError(f"only latents of {rows.path} are here; {remedy}")
            try:
                image = self.crops.decode(loaded.image)
                corner = self.crops.cut(image, crop, number, pixels)
            except RowError as error:
                raise RowError(error.reason, f"{rows.path} row {number}: {error}") from error
        except RowError as error:
            if self.latents:
                self.latents.mark_bad(part, number, error.reason)
            raise
        return loaded, corner, (image.shape[0], image.shape[1])


def _find(kind: type, inputs: dict[str, Input]) -> Input | None:
    return next((one for one in inputs.values() if isinstance(one, kind)), None)
