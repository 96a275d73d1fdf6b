"""Samples as a function of (epoch, row): what to train on, with every random number that the step will need.

The keys of a sample, all numpy:

    pixel_values     uint8 [3, R, R]        the crop
    posterior_noise  float32 latent_shape   standard normal, for the autoencoder's posterior
    row_ids          int64 []               the number of the row used, among all rows, selected or not; it differs from
                                            that of the row asked for where that one was bad
    skipped          list of str            the reasons why rows before it were not
    input_ids        int64 [L]              token ids of the caption, or of "" where it was dropped
    timesteps        int64 []               in [0, num_train_timesteps)
    noise            float32 latent_shape   standard normal, plus `noise_offset` times one standard normal a channel

    input_noise      float32 latent_shape   with `input_perturbation` alone: `noise` plus that many times another
                                            standard normal

The last four are left out with `pixels_only`. A bad row is replaced by the next good one of its own list, in the list's
order of that epoch (`ppldm.data.order.Successors`), so that the stand-in too is a function of (seed, epoch, row). All
draws come from `make_rng(seed, stream, epoch, row)` with the row asked for, so that a bad row changes no number but its
own pixels and caption. `row` is its number among all rows, so
that a row is cropped, noised and so on alike whatever else is selected.
"""

import math
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain

import numpy as np

from ..utils.errors import ConfigError, DataError, PpldmError, RowError, describe
from ..utils.rng import Stream, make_rng
from .bad_rows import BadRows
from .filelist import Source
from .fingerprint import Fingerprint, take_fingerprint
from .formats.row import Row
from .formats.watched import WatchedPart
from .images.crop import crop_pixels
from .images.decode import decode_pixels
from .images.resize import INTERPOLATIONS
from .open_parts import OpenParts, count_open_parts
from .order import Successors
from .select.selection import Selection, select_rows
from .text.tokenizer import CaptionTokenizer


class TextImageDataset:
    """The selected rows of all sources, in order: source by source, part by part. `len()` is how many.

    selection: which; None for all.

    tokenizer: may be None with `pixels_only`. latent_shape: (channels, height, width). crop_fraction: in (0, 1], the
    crop's share of the resized short side. random_crop: False crops the centre. interpolation: one of
    INTERPOLATIONS.
    `list_sizes`, `weights`: the rows and weights of the sources, as `Mix` takes them. Raises PartError, ConfigError.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer: CaptionTokenizer | None,
        resolution: int,
        latent_shape: tuple[int, int, int],
        seed: int,
        caption_drop_probability: float = 0.1,
        crop_fraction: float = 0.9,
        random_crop: bool = True,
        random_flip: bool = False,
        num_train_timesteps: int = 1000,
        noise_offset: float = 0.0,
        input_perturbation: float = 0.0,
        pixels_only: bool = False,
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
        self.tokenizer, self.resolution, self.latent_shape, self.seed = tokenizer, resolution, latent_shape, seed
        self.caption_drop_probability, self.num_train_timesteps = caption_drop_probability, num_train_timesteps
        self.crop_fraction, self.random_crop, self.random_flip = crop_fraction, random_crop, random_flip
        self.noise_offset, self.input_perturbation = noise_offset, input_perturbation
        self.pixels_only, self.bad_rows = pixels_only, bad_rows
        self.interpolation = interpolation
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

    @property
    def sample_bytes(self) -> int:
        """The bytes of a sample's large arrays, pixels and noises."""
        num_noises = 1 if self.pixels_only else 3 if self.input_perturbation else 2
        return 3 * self.resolution**2 + num_noises * 4 * math.prod(self.latent_shape)

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

    def make_batch(self, places: list[tuple[int, int]]) -> dict:
        """The samples of several (epoch, place), stacked; `skipped` lists are joined. Raises DataError."""
        keys = [(epoch, self.selection[place]) for epoch, place in places]
        pixels = np.empty((len(keys), 3, self.resolution, self.resolution), dtype=np.uint8)
        captions, used_rows, skipped = [], [], []
        for (epoch, place), key, crop in zip(places, keys, pixels, strict=True):
            load = partial(self._load, self._draw_corner(key), crop)
            candidates = chain([place], self._successors.after(epoch, place))
            choices, used_place, reasons = self.bad_rows.load(load, candidates)
            if self.random_flip and self._rng(Stream.FLIP, key).random() < 0.5:
                crop[:] = crop[:, :, ::-1].copy()
            captions.append(self._draw_caption(key, choices))
            used_rows.append(self.selection[used_place])
            skipped += reasons
        batch = {
            "pixel_values": pixels,
            "posterior_noise": self._draw_normals(Stream.POSTERIOR, keys),
            "row_ids": np.array(used_rows, dtype=np.int64),
            "skipped": skipped,
        }
        if self.pixels_only:
            return batch
        timesteps = [int(self._rng(Stream.TIMESTEP, key).random() * self.num_train_timesteps) for key in keys]
        batch |= {
            "input_ids": self.tokenizer.encode(captions),
            "timesteps": np.array(timesteps, dtype=np.int64),
            "noise": self._draw_noise(keys),
        }
        if self.input_perturbation:
            # Ning et al. 2023, arXiv:2301.11706
            perturbation = self._draw_normals(Stream.INPUT_PERTURBATION, keys)
            batch["input_noise"] = batch["noise"] + np.float32(self.input_perturbation) * perturbation
        return batch

    def _draw_corner(self, key: tuple[int, int]) -> tuple[float, float] | None:
        return tuple(self._rng(Stream.CROP, key).random(2)) if self.random_crop else None

    def _draw_caption(self, key: tuple[int, int], choices: tuple[str, ...]) -> str:
        if self.pixels_only or self._rng(Stream.CAPTION_DROP, key).random() < self.caption_drop_probability:
            return ""
        return choices[int(self._rng(Stream.CAPTION_CHOICE, key).random() * len(choices)) if len(choices) > 1 else 0]

    def _draw_noise(self, keys: list[tuple[int, int]]) -> np.ndarray:
        noise = self._draw_normals(Stream.NOISE, keys)
        if self.noise_offset:
            # https://www.crosslabs.org/blog/diffusion-with-offset-noise
            shape = (self.latent_shape[0], 1, 1)
            offsets = [self._rng(Stream.NOISE_OFFSET, key).standard_normal(shape, dtype=np.float32) for key in keys]
            noise += np.float32(self.noise_offset) * np.stack(offsets)
        return noise

    def _draw_normals(self, stream: Stream, keys: list[tuple[int, int]]) -> np.ndarray:
        """Standard normal numbers, float32 [len(keys), *latent_shape]."""
        normals = np.empty((len(keys), *self.latent_shape), dtype=np.float32)
        for key, place in zip(keys, normals, strict=True):
            self._rng(stream, key).standard_normal(dtype=np.float32, out=place)
        return normals

    def _rng(self, stream: Stream, key: tuple[int, int]) -> np.random.Generator:
        return make_rng(self.seed, stream, *key)

    def _locate(self, row: int) -> tuple[WatchedPart, int]:
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
