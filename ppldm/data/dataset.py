"""Samples as a function of (epoch, row): what to train on, with every random number that the step will need.

A sample has an array for each of the model's `inputs` (`ppldm.data.inputs`), and

    row_ids          int64 []               the number of the row used, among all rows, selected or not; it differs from
                                            that of the row asked for where that one was bad
    skipped          list of str            the reasons why rows before it were not

A bad row is replaced by the next good one of its own list, in the list's order of that epoch
(`ppldm.data.order.Successors`), so that the stand-in too is a function of (seed, epoch, row). All draws come from
`make_rng(seed, stream, epoch, row)` with the row asked for, so that a bad row changes no number but its own pixels and
caption. `row` is its number among all rows, so that a row is cropped, noised and so on alike whatever else is selected.
"""

from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain

import numpy as np

from ..utils.errors import ConfigError, DataError, PpldmError, RowError, describe
from ..utils.rng import Stream, make_rng
from .bad_rows import BadRows
from .filelist import Source
from .fingerprint import Fingerprint, take_fingerprint
from .formats.open import Rows
from .formats.row import Row
from .images.crop import crop_pixels
from .images.decode import decode_pixels
from .images.resize import INTERPOLATIONS
from .inputs import Input, Pixels, Tokens, count_bytes
from .open_parts import OpenParts, count_open_parts
from .order import Successors
from .select.selection import Selection, select_rows
from .text.tokenizer import CaptionTokenizer


class TextImageDataset:
    """The selected rows of all sources, in order: source by source, part by part. `len()` is how many.

    selection: which; None for all. inputs: what a batch holds of them, by name; of pictures of `resolution` pixels a
    side. tokenizer: may be None without `Tokens` among them. crop_fraction: in (0, 1], the crop's share of the resized
    short side. random_crop: False crops the centre. interpolation: one of INTERPOLATIONS.
    `list_sizes`, `weights`: the rows and weights of the sources, as `Mix` takes them. Raises PartError, ConfigError.
    """

    def __init__(
        self,
        sources: list[Source],
        inputs: dict[str, Input],
        resolution: int,
        seed: int,
        tokenizer: CaptionTokenizer | None = None,
        caption_drop_probability: float = 0.1,
        crop_fraction: float = 0.9,
        random_crop: bool = True,
        random_flip: bool = False,
        bad_rows: BadRows = BadRows(),  # noqa: B008 (frozen)
        selection: Selection | None = None,
        interpolation: str = "lanczos",
    ):
        if not 0 < crop_fraction <= 1:
            raise ConfigError(f"crop_fraction is {crop_fraction}; it must be over 0 and at most 1")
        if not 0 <= caption_drop_probability <= 1:
            raise ConfigError(f"caption_drop_probability is {caption_drop_probability}; it must be in [0, 1]")
        if interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation is {interpolation}; it must be one of {', '.join(INTERPOLATIONS)}")
        self.inputs, self.size, self.tokenizer, self.seed = inputs, (resolution, resolution), tokenizer, seed
        self.caption_drop_probability = caption_drop_probability
        self.crop_fraction, self.random_crop, self.random_flip = crop_fraction, random_crop, random_flip
        self.bad_rows, self.interpolation = bad_rows, interpolation
        self.sample_bytes = count_bytes(inputs, self.size)
        self.sources = sources
        self.selection = select_rows(sources) if selection is None else selection
        self.list_sizes = self.selection.list_sizes
        weights = [source.weight for source in sources]
        self.weights = None if None in weights else weights
        self._successors = Successors(self.list_sizes, self.weights, seed)
        self._parts = OpenParts(
            [(path, source) for source in sources for path in source.parts],
            count_open_parts(self.selection.rows_of_parts, [len(source.parts) for source in sources], self.weights),
            self.selection.contents,
        )

    def __len__(self) -> int:
        return len(self.selection)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What all rows of the sources are, selected or not."""
        return take_fingerprint(self.sources, np.diff(self.selection.starts).tolist(), self.selection.contents)

    def read_row(self, row: int) -> Row:
        """Row number `row` of all rows, selected or not. Raises RowError, DataError."""
        with self._naming(row):
            part, number = self._locate(row)
            return part.read(number)

    def __getitem__(self, key: tuple[int, int]) -> dict:
        """The sample of (epoch, place among the selected rows); see the module. Raises DataError."""
        batch = self.make_batch([key])
        return {name: values if name == "skipped" else values[0] for name, values in batch.items()}

    def spread(self, count: int) -> list[int]:
        """At most `count` places, evenly spread over all."""
        return spread(len(self), count)

    def make_batch(self, places: list[tuple[int, int]]) -> dict:
        """The samples of several (epoch, place), stacked; `skipped` lists are joined. Raises DataError."""
        keys = [(epoch, self.selection[place]) for epoch, place in places]
        pixels = np.empty((len(keys), *Pixels().shape(*self.size)), dtype=np.uint8)
        captions, used_rows, skipped = [], [], []
        for (epoch, place), key, crop in zip(places, keys, pixels, strict=True):
            load = partial(self._load, self._draw_corner(key), crop)
            candidates = chain([place], self._successors.after(epoch, place))
            choices, used_place, reasons = self.bad_rows.load(load, candidates)
            if self.random_flip and self._rng(Stream.FLIP, key).random() < 0.5:
                crop[:] = crop[:, :, ::-1].copy()
            if self.tokenizer:
                captions.append(self._draw_caption(key, choices))
            used_rows.append(self.selection[used_place])
            skipped += reasons
        batch = {"row_ids": np.array(used_rows, dtype=np.int64), "skipped": skipped}
        for name, wanted in self.inputs.items():
            if isinstance(wanted, Pixels):
                batch[name] = pixels
            elif isinstance(wanted, Tokens):
                batch[name] = self.tokenizer.encode(captions)
            else:
                batch[name] = wanted.draw(keys, self.size, self._rng, batch)
        return batch

    def _draw_corner(self, key: tuple[int, int]) -> tuple[float, float] | None:
        return tuple(self._rng(Stream.CROP, key).random(2)) if self.random_crop else None

    def _draw_caption(self, key: tuple[int, int], choices: tuple[str, ...]) -> str:
        if self._rng(Stream.CAPTION_DROP, key).random() < self.caption_drop_probability:
            return ""
        return choices[int(self._rng(Stream.CAPTION_CHOICE, key).random() * len(choices)) if len(choices) > 1 else 0]

    def _rng(self, stream: Stream, key: tuple[int, int]) -> np.random.Generator:
        return make_rng(self.seed, stream, *key)

    def _locate(self, row: int) -> tuple[Rows, int]:
        """The part of a row, and the row's number in it."""
        part, number = self._number_in_part(row)
        return self._parts[part], number

    def _number_in_part(self, row: int) -> tuple[int, int]:
        """(number of a row's part, the row's number in it)."""
        if not 0 <= row < self.selection.num_rows:
            raise IndexError(f"there are rows 0 to {self.selection.num_rows - 1}, no row {row}")
        part = int(np.searchsorted(self.selection.starts, row, side="right")) - 1
        return part, row - int(self.selection.starts[part])

    @contextmanager
    def _naming(self, row: int):
        """Makes of whatever reading a row raises, and nobody foresaw, a DataError that names its part and number: a
        disk that fails, a file that is changed while it is used."""
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

    def _load(self, corner: tuple[float, float] | None, crop: np.ndarray, place: int) -> tuple[str, ...]:
        """The captions of a selected row, whose pixels go to `crop`. Raises RowError."""
        row = self.selection[place]
        with self._naming(row):
            part, number = self._locate(row)
            loaded = part.read(number)
            try:
                pixels = decode_pixels(loaded.image, exact=self.interpolation != "area")
                crop_pixels(pixels, self.crop_fraction, corner, self.interpolation, crop)
            except RowError as error:
                raise RowError(error.reason, f"{part.path} row {number}: {error}") from error
            return (loaded.caption, *loaded.other_captions)


def spread(num_rows: int, count: int) -> list[int]:
    """At most `count` row numbers, evenly spread."""
    return sorted(set(np.linspace(0, num_rows - 1, min(count, num_rows)).astype(int).tolist()))
