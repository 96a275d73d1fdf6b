"""The moments and the embeddings of a run's rows, from the cached files of their parts, or from shards of MDS.

With `latents=ondemand` a row that is missing is read as a picture, encoded in the step that first sees it, and kept,
rounded as it is kept: all later epochs see the same numbers, and `ppldm precompute` could have made the file.
Embeddings are those of the texts that may be drawn of a row, in the order of `CaptionRule.texts`, as many as the row's
code says; a row behind the last of the part is the empty caption. Their files hold neither texts nor sizes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config.data import EAGER
from ...utils.errors import ConfigError, PartError, RowError
from ...utils.files import make_output_dir
from ...utils.log import get_logger
from ...utils.processes.workers import map_in_threads
from ...utils.text import count_of
from ..formats.base import writing
from ..formats.index import build_lock
from ..formats.open import LastUsed, OpenParts
from ..formats.row import Row
from ..images import CropRule
from ..inputs import Moments, TextEmbeddings
from ..select.selection import Selection
from ..text.captions import CaptionRule
from .file import CachedFile, Latents, cached_path, create_latents, find_alike, find_cached
from .key import CacheKey, EmbeddingsKey, LatentsKey


@dataclass(frozen=True)
class LatentsRule:
    """What latents a model can train on: of the autoencoder of this digest (`weights.components.encoder_digest`), kept
    in `dtype`. scaling_factor: of the autoencoder, for latents that were stored times it; None where its config shifts
    them too."""

    autoencoder: str
    scaling_factor: float | None
    dtype: str = "float16"


@dataclass(frozen=True)
class EmbeddingsRule:
    """What embeddings a model can train on. key: of its frozen text encoder, without captions or part. empty_is_zeros:
    whether it takes zeros for the empty caption; nothing that is kept depends on it."""

    key: EmbeddingsKey
    empty_is_zeros: bool = False


class _OfParts:
    """Arrays of all `parts` of a run, by their numbers. run_key: of no part yet."""

    def __init__(self, run_key: CacheKey, parts: OpenParts):
        self._run_key, self._parts = run_key, parts
        self._open = LastUsed(self._open_part, parts.count)

    def _place(self, number: int) -> tuple[Path, Any, Path | None]:
        """The part, the key and the folder of its arrays, as `cached.file` finds them."""
        path, source = self._parts.names[number]
        return path, self._run_key.of_part(source, self._parts.contents[number]), source.latents_dir

    def _mode(self, number: int) -> str:
        """Whether the latents of a part are `cached`, computed `ondemand`, or `off`."""
        return self._parts.names[number][1].latents

    def _find_shard(self, number: int, kind):
        """A shard of MDS that has such arrays itself."""
        shard = self._parts[number] if self._parts.names[number][1].format == "mds" else None
        return kind(shard, self) if getattr(shard, kind.column, None) else None


class CachedMoments(_OfParts):
    """Moments; a part that is trained on as pictures has none. shapes: (height, width) in pixels of the crops. `keeps`:
    whether what is missing is kept. Raises ConfigError for crops that are not enumerated, PartError without latents."""

    def __init__(
        self, rule: LatentsRule, moments: Moments, crops: CropRule, shapes: list, parts: OpenParts, selection: Selection
    ):
        super().__init__(LatentsKey.of(rule.autoencoder, shapes, crops, rule.dtype), parts)
        self.rule, self.moments, self.crops, self.shapes = rule, moments, crops, shapes
        self._selection, self._writable = selection, LastUsed(self._open_writable, parts.count)
        modes = [self._mode(number) for number in range(len(parts.names))]
        self.keeps = "ondemand" in modes
        if not crops.num_variants:
            raise ConfigError(
                "cached latents are of crops that are known ahead; train with --random_crop false, or with --num_crops "
                "N, as `ppldm precompute --crops` made them"
            )
        used = [number for number, mode in enumerate(modes) if mode == "cached"]
        map_in_threads(self._check_part, used, "looking for latents")

    def read(self, number: int, row: int, variant: int, size: tuple[int, int]) -> tuple[Row, np.ndarray] | None:
        """(the texts of row `row` of part `number`, moments float32 [2, C, h, w] of a variant, of pictures of that
        height and width); None where it is to be read as a picture. Raises RowError, PartError, OutputError."""
        files, mode = self._open.get(number), self._mode(number)
        for latents in [one for one in files if one.shape(row) == tuple(size)]:
            if (moments := latents.read(row, variant, mode == "ondemand")) is not None:
                break
        else:
            if mode != "cached":
                return None
            raise PartError(
                f"{files[0].path} lacks latents of row {row}; complete it with `{self._place(number)[1].command}`, or "
                "train with --latents ondemand"
            )
        if moments.shape != self.moments.shape(*size):
            raise PartError(f"{latents.path} row {row} has latents of shape {moments.shape}, not of pictures of {size}")
        return latents.texts(row), moments

    def mark_bad(self, number: int, row: int, reason: str) -> None:
        """Keep, where rows are kept, why one cannot be used; not of one whose file failed, which may pass."""
        if self._mode(number) == "ondemand" and reason != "unreadable":
            latents = self._writable.get(number)
            for variant in range(latents.num_variants):
                latents.mark_bad(row, variant, reason)

    def keep(self, places: np.ndarray, moments: np.ndarray) -> np.ndarray:
        """Moments [M, 2, C, h, w] float32 that were just computed, as they will be read again. places: int64 [M, 3],
        part, row in it and variant. Those that are not finite are kept as bad rows, and returned as they are."""
        moments = moments.copy()
        for (number, row, variant), one in zip(places.tolist(), moments, strict=True):
            if self._mode(number) == "ondemand":
                latents = self._writable.get(number)
                # Another epoch, or another rank that replaces a bad row, may have been faster.
                found = None if latents.reason(row, variant) else latents.read(row, variant, True)
                kept = latents.write(row, variant, one) if found is None else found
                if kept is not None:
                    one[:] = kept
        return moments

    def _check_part(self, number: int) -> None:
        if shard := self._find_shard(number, _MdsLatents):
            shard.check()
            return
        place = self._place(number)
        files = find_alike(*place)
        if files[0] == cached_path(*place):
            return
        opened, (rows, codes) = [Latents(file) for file in files], self._selection.rows_of(number)
        lacking = [
            row
            for row, code in zip(rows.tolist(), codes.tolist(), strict=True)
            if not any(one.shape(row) == tuple(self.shapes[code]) for one in opened)
        ]
        if lacking and len(lacking) == len(rows):
            find_cached(*place)  # which says in what they differ
        if lacking:
            raise PartError(
                f"{files[0]} lacks latents of {count_of(len(lacking), 'row')} in the shapes of this run, such as row "
                f"{lacking[0]}; make them with `{place[1].command}`"
            )

    def _open_part(self, number: int) -> list:
        """What has moments of a part, of whichever shapes."""
        if self._mode(number) == "off":
            return []
        if shard := self._find_shard(number, _MdsLatents):
            return [shard]
        _, key, _ = place = self._place(number)
        own = cached_path(*place)
        if self._mode(number) == "ondemand":
            self._create(number, own, key)
        return [Latents(file, key if file == own else None) for file in find_alike(*place)]

    def _open_writable(self, number: int) -> Latents:
        place = self._place(number)
        latents = Latents(cached_path(*place), place[1], writable=True)
        latents.check_engine(EAGER)
        return latents

    def _create(self, number: int, target: Path, key: LatentsKey) -> None:
        """Make the file of a part's latents, without any, where it is not there yet; by one of all processes."""
        make_output_dir(target.parent)
        with build_lock(target):
            if not target.is_file():
                header, part = {"channels": self.moments.channels, "factor": self.moments.factor}, self._parts[number]
                get_logger().info("reading the texts of %s, once", part.path)
                with writing(target, "free some space, or set --latents_dir"):
                    create_latents(target, key, header, part)


class CachedEmbeddings(_OfParts):
    """Embeddings. Raises ConfigError where captions cannot be enumerated, PartError where embeddings are missing."""

    def __init__(self, rule: EmbeddingsRule, embeddings: TextEmbeddings, captions: CaptionRule, parts: OpenParts):
        super().__init__(rule.key.with_captions(captions), parts)
        self.rule, self.captions, self.shape = rule, captions, embeddings.shape(0, 0)
        map_in_threads(self._find, range(len(parts.names)), "looking for text embeddings")

    def read(self, number: int, row: int, place: int | None) -> np.ndarray:
        """float32 [L, D] of the text at `place` of a row; None: of the empty caption. Raises RowError, PartError."""
        file = self._open.get(number)
        found = file.read(len(file) - 1, 0) if place is None else file.read(row, place)
        if found is None:
            raise PartError(f"{file.path} lacks embeddings of row {row}; complete it with `{file.key.command}`")
        if found.shape != self.shape:
            raise PartError(f"{file.path} has embeddings of shape {found.shape}, not {self.shape}")
        return found

    def _find(self, number: int) -> "Path | _MdsEmbeddings":
        if shard := self._find_shard(number, _MdsEmbeddings):
            shard.check()
        return shard or find_cached(*self._place(number))

    def _open_part(self, number: int) -> "CachedFile | _MdsEmbeddings":
        found = self._find(number)
        return CachedFile(found, self._place(number)[1]) if isinstance(found, Path) else found


@dataclass(frozen=True)
class _InShard:
    """What is in a shard of MDS itself, which does not say what made it."""

    shard: Any
    run: Any

    @property
    def path(self) -> Path:
        return self.shard.path


class _MdsLatents(_InShard):
    """Latents: one sample of the posterior, scaled, and not its moments, so that the standard deviation is 0."""

    column = "latents"

    def check(self) -> None:
        """Raises ConfigError, PartError where these latents cannot be those of the run."""
        (height, width), *others = self.run.shapes
        if others or height != width or self.run.crops.num_variants != 1:
            raise ConfigError(
                f"{self.path} holds latents of squares cut at the centre; train with --buckets off, --random_crop "
                "false and --random_flip false"
            )
        if self.run.rule.scaling_factor is None:
            raise ConfigError(
                f"{self.path} holds latents that are only scaled; train on them with a VAE whose config has no "
                "shift_factor and latents_mean, and without --latents_statistics"
            )
        if height not in self.shard.latents:
            made = ", ".join(map(str, sorted(self.shard.latents)))
            raise PartError(f"{self.path} has latents of {made} pixels, not of {height}; set --resolution")

    def shape(self, row: int) -> tuple[int, ...]:
        """The same for all rows."""
        return tuple(self.run.shapes[0])

    def read(self, row: int, variant: int, on_demand: bool) -> np.ndarray:
        """Moments of a row, float32 [2, C, h, w]."""
        moments = np.zeros(self.run.moments.shape(*self.shape(row)), np.float32)
        latents = self.shard.read_latents(row, self.shape(row)[0], moments.shape[1:])
        np.divide(latents, self.run.rule.scaling_factor, out=moments[0])
        return moments

    def texts(self, row: int) -> Row:
        """A row, without its picture."""
        caption, meta = self.shard.read_fields(row)
        return Row(caption, b"", meta)


class _MdsEmbeddings(_InShard):
    """Embeddings of each row's caption, as a `CachedFile` gives them; of the empty caption it gives zeros."""

    column = "has_caption_latents"

    def check(self) -> None:
        """Raises ConfigError, PartError where these embeddings cannot be those of the run."""
        captions = self.run.captions
        if captions.weights or captions.clean:
            raise ConfigError(f"{self.path} holds embeddings of one caption; omit --captions and --clean_captions")
        if captions.drop_probability and not self.run.rule.empty_is_zeros:
            raise ConfigError(
                f"{self.path} holds no embedding of an empty caption; train with --empty_caption zeros, as "
                "micro_diffusion does, or with --caption_drop 0"
            )
        try:
            self.shard.read_caption_latents(0, self.run.shape)
        except RowError as error:
            if error.reason == "latents":
                raise PartError(f"{error}; set --model_max_length and the text encoder that made them") from error

    def __len__(self) -> int:
        return len(self.shard) + 1

    def read(self, row: int, place: int) -> np.ndarray:
        """Embeddings of a row's caption, float32 [L, D]; the last row is the empty caption."""
        if row == len(self.shard):
            return np.zeros(self.run.shape, np.float32)
        return self.shard.read_caption_latents(row, self.run.shape).astype(np.float32)
