"""The moments of a run's rows from the latents of their parts: which file is whose, and one opened at a time is needed.

A part of a list with `latents=cached` has all of its rows there: in a file of cached latents (`cached.latents`), or, a
shard of MDS, in itself. With `latents=ondemand` a row that is missing is read as a picture, encoded in the step that
first sees it, and kept, rounded as it is kept: all later epochs see the same numbers, and the file is one that
`ppldm precompute` could have made.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...config.data import EAGER
from ...utils.errors import ConfigError, OutputError, PartError
from ...utils.files import make_output_dir
from ...utils.log import get_logger
from ...utils.processes.workers import map_in_threads
from ...utils.text import count_of
from ..filelist import Source
from ..formats.index.lock import build_lock
from ..formats.row import Row
from ..formats.rows import Rows
from ..images.crop import CropRule
from ..inputs import Moments
from ..open_parts import LastUsed, OpenParts
from ..select.selection import Selection
from .find import cached_path, find_alike, find_cached
from .key import LatentsKey
from .latents import Latents, create_latents

if TYPE_CHECKING:
    from ..formats.mds.shard import MdsShard


@dataclass(frozen=True)
class LatentsRule:
    """What latents a model can train on: of the autoencoder of this digest (`weights.components.encoder_digest`), kept
    in `dtype`. scaling_factor: of the autoencoder, for latents that were stored with it."""

    autoencoder: str
    scaling_factor: float
    dtype: str = "float16"


class CachedMoments:
    """Those of all parts of a run, by the numbers of parts; one that is trained on as pictures has none.

    parts: (path, how to read it). shapes: (height, width) in pixels of the crops. count: how many to keep open. rows:
    the parts themselves. selection: the rows of the run. `keeps`: whether what is missing is kept. Raises ConfigError
    where crops are not enumerated, PartError where latents are missing or of something else.
    """

    def __init__(
        self,
        rule: LatentsRule,
        moments: Moments,
        crops: CropRule,
        shapes: list[tuple[int, int]],
        parts: list[tuple[Path, Source]],
        count: int,
        rows: OpenParts,
        selection: Selection,
    ):
        self._rule, self._moments, self._crops, self._shapes = rule, moments, crops, shapes
        self._parts, self._rows, self._selection = parts, rows, selection
        self._run_key = LatentsKey.of(rule.autoencoder, shapes, crops, rule.dtype)
        self.keeps = any(source.latents == "ondemand" for _, source in parts)
        _check_crops(crops)
        used = [number for number, (_, source) in enumerate(parts) if source.latents == "cached"]
        map_in_threads(self._check_part, used, "looking for latents")
        self._open = LastUsed(self._open_part, count)
        self._writable = LastUsed(self._open_writable, count)

    def read(self, number: int, row: int, variant: int, size: tuple[int, int]) -> tuple[Row, np.ndarray] | None:
        """(the texts of row `row` of part `number`, moments float32 [2, C, h, w] of a variant, of pictures of that
        height and width); None where it is to be read as a picture. Raises RowError, PartError, OutputError."""
        files, mode = self._open(number), self._parts[number][1].latents
        moments = None
        for latents in [one for one in files if one.has_shape(row, size)]:
            if (moments := _read(latents, row, variant, mode)) is not None:
                break
        if moments is None:
            if mode == "cached":
                raise PartError(
                    f"{files[0].path} lacks latents of row {row}; complete it with `{self._key(number).command}`, or "
                    "train with --latents ondemand"
                )
            return None
        if moments.shape != self._moments.shape(*size):
            raise PartError(f"{latents.path} row {row} has latents of shape {moments.shape}, not of pictures of {size}")
        return latents.texts(row), moments

    def mark_bad(self, number: int, row: int, reason: str) -> None:
        """Keep, where rows are kept, why one cannot be used; not of one whose file failed, which may pass."""
        if self._parts[number][1].latents == "ondemand" and reason != "unreadable":
            latents = self._writable(number)
            for variant in range(latents.num_variants):
                latents.mark_bad(row, variant, reason)

    def keep(self, places: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """Moments [M, 2, C, h, w] float32 that were just computed, as they will be read again: kept where that was
        asked for. places: int64 [M, 3], part, row in it and variant. Those that are not finite are kept as bad rows,
        and returned as they are."""
        moments = moments.copy()
        for (number, row, variant), one in zip(places.tolist(), moments, strict=True):
            if self._parts[number][1].latents == "ondemand":
                latents = self._writable(number)
                # Another epoch, or another rank that replaces a bad row, may have been faster.
                found = None if latents.reason(row, variant) else _read(latents, row, variant, "ondemand")
                kept = latents.write(row, variant, one) if found is None else found
                if kept is not None:
                    one[:] = kept
        return moments

    def _key(self, number: int) -> LatentsKey:
        return self._run_key.of_part(self._parts[number][1], self._selection.contents[number])

    def _check_part(self, number: int) -> None:
        path, source = self._parts[number]
        if source.format == "mds" and (shard := _MdsLatents.find(self._rows[number], self)):
            shard.check()
            return
        files, key = self._find_files(number), self._key(number)
        if files[0] == cached_path(path, key, source.latents_dir):
            return
        opened, (rows, codes) = [Latents(file) for file in files], self._selection.rows_of(number)
        lacking = [
            row
            for row, code in zip(rows.tolist(), codes.tolist(), strict=True)
            if not any(one.has_shape(row, self._shapes[code]) for one in opened)
        ]
        if lacking and len(lacking) == len(rows):
            find_cached(path, key, source.latents_dir)  # which says in what they differ
        if lacking:
            raise PartError(
                f"{files[0]} lacks latents of {count_of(len(lacking), 'row')} in the shapes of this run, such as row "
                f"{lacking[0]}; make them with `{key.command}`"
            )

    def _find_files(self, number: int) -> list[Path]:
        """Those with latents of a part, of whichever shapes. Raises PartError where there are none."""
        path, source = self._parts[number]
        key = self._key(number)
        return find_alike(path, key, source.latents_dir) or [find_cached(path, key, source.latents_dir)]

    def _open_part(self, number: int):
        path, source = self._parts[number]
        if source.latents == "off":
            return []
        if source.format == "mds" and (shard := _MdsLatents.find(self._rows[number], self)):
            return [shard]
        key = self._key(number)
        own = cached_path(path, key, source.latents_dir)
        if source.latents == "ondemand":
            self._create(number, own, key)
        return [Latents(file, key if file == own else None) for file in self._find_files(number)]

    def _open_writable(self, number: int) -> Latents:
        path, source = self._parts[number]
        key = self._key(number)
        latents = Latents(cached_path(path, key, source.latents_dir), key, writable=True)
        latents.check_engine(EAGER)
        return latents

    def _create(self, number: int, target: Path, key: LatentsKey) -> None:
        """Make the file of a part's latents, without any, where it is not there yet; by one of all processes."""
        make_output_dir(target.parent)
        with build_lock(target):
            if target.is_file():
                return
            header = {"channels": self._moments.channels, "factor": self._moments.factor}
            get_logger().info("reading the texts of %s, once", self._parts[number][0])
            try:
                create_latents(target, key, header, self._rows[number])
            except OSError as error:
                raise OutputError(
                    f"cannot write {target}: {error.strerror or error}; free some space, or set --latents_dir"
                ) from error


class _MdsLatents:
    """The latents in a shard of MDS: one sample of the posterior, scaled, and not its moments. So the standard
    deviation is 0. It does not say which autoencoder made it."""

    def __init__(self, shard: "MdsShard", owner: CachedMoments):
        self.path, self._shard, self._moments = shard.path, shard, owner._moments
        self._scale, self._crops, self._shapes = owner._rule.scaling_factor, owner._crops, owner._shapes

    @classmethod
    def find(cls, shard: Rows, owner: CachedMoments) -> "_MdsLatents | None":
        """Of a shard that has any."""
        return cls(shard, owner) if getattr(shard, "latents", None) else None  # of MdsShard

    def check(self) -> None:
        """Raises ConfigError, PartError where these latents cannot be those of the run."""
        (height, width), *others = self._shapes
        if others or height != width or self._crops.num_variants != 1:
            raise ConfigError(
                f"{self.path} holds latents of squares cut at the centre; train with --buckets off, --random_crop "
                "false and --random_flip false"
            )
        if height not in self._shard.latents:
            made = ", ".join(map(str, sorted(self._shard.latents)))
            raise PartError(f"{self.path} has latents of {made} pixels, not of {height}; set --resolution")

    def read(self, row: int, variant: int) -> np.ndarray:
        """As `Latents.read`."""
        moments = np.zeros(self._moments.shape(*self._shapes[0]), np.float32)
        np.divide(self._shard.read_latents(row, self._shapes[0][0], moments.shape[1:]), self._scale, out=moments[0])
        return moments

    def has_shape(self, row: int, size: tuple[int, int]) -> bool:
        """All have one, which is checked."""
        return True

    def texts(self, row: int) -> Row:
        """As `Latents.texts`."""
        caption, meta = self._shard.read_fields(row)
        return Row(caption, b"", meta)


def _read(latents, row: int, variant: int, mode: str) -> np.ndarray | None:
    """What is damaged, as a machine leaves it that lost its power, is missing where it can be computed again."""
    if mode == "ondemand" and latents.is_damaged(row, variant):
        return None
    return latents.read(row, variant)


def _check_crops(crops: CropRule) -> None:
    if not crops.num_variants:
        raise ConfigError(
            "cached latents are of crops that are known ahead; train with --random_crop false, or with --num_crops N, "
            "as `ppldm precompute --crops` made them"
        )
