"""The pictures that are compared: those of a folder or of a filelist, with what tells two sets of them apart.

When a set is opened every picture is decoded once: one that cannot be is left out and counted; the digest is of the ids
and bytes of the others. After that a picture is read when it is asked for. With a `resolution`, one of another size is
resized until its shorter side has it (Lanczos, Pillow's pixels) and cropped in the centre, as training does with
--center_crop and a --crop_fraction of 1.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from PIL import Image

from ..data.filelist import read_sources
from ..data.formats.folder import IMAGE_SUFFIXES, PICTURE_SUFFIXES, decode_caption, find_caption, list_pictures
from ..data.formats.open import OpenParts, build_indexes
from ..data.images import decode_pixels, scale_to_cover
from ..inference.pictures.draw import read_settings
from ..utils.errors import DataError, RowError
from ..utils.log import get_logger, progress
from ..utils.rng import Stream, make_rng

RESIZE = "lanczos (Pillow), shorter side, centre crop"
_FORMATS = {b"\xff\xd8": "JPEG", b"\x89P": "PNG", b"RI": "WebP"}
_OPEN_PARTS = 16
WEIGHTS = "weights"  # of the settings of a drawn picture, which weights drew it


@dataclass(frozen=True)
class Stored:
    """A picture as it is stored. drawn: the settings that `ppldm generate` wrote into it, of another one None."""

    id: str
    image: bytes
    caption: str | None = None
    drawn: dict | None = None


@dataclass(frozen=True)
class PictureSet(Sequence):
    """Pictures by number, each decoded when it is asked for, uint8 [H, W, 3]. digest: SHA-256 of ids, bytes and what is
    made of them. drawn: the settings that all share of pictures that `ppldm generate` drew. requests: SHA-256 of the
    captions, and of the settings that they do not share. facts: JSON-ready, see `open_pictures`."""

    where: str
    ids: list[str]
    captions: list[str | None]
    digest: str
    requests: str
    drawn: dict
    facts: dict
    resolution: int | None
    numbers: tuple[int, ...]  # of the pictures at where they come from
    read: Callable[[int], Stored]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> np.ndarray:
        pixels, side = decode_pixels(self.read(self.numbers[number]).image), self.resolution
        if side is None or pixels.shape[:2] == (side, side):
            return pixels
        # Not data/kernels.py, whose loops take longer to compile than Pillow takes for thousands of pictures.
        size = scale_to_cover(*pixels.shape[:2], side, side, 1.0)  # type: ignore[call-arg]
        left, top = ((length - side + 1) // 2 for length in size)
        whole = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
        return np.asarray(whole.crop((left, top, left + side, top + side)))


@dataclass(frozen=True)
class Statistics:
    """Mean [D] and root [D, D], whose product rootᵀ root is the covariance, of InceptionV3's features of real pictures,
    instead of these; digest and facts as a `PictureSet` has them."""

    where: str
    moments: tuple[np.ndarray, np.ndarray]
    digest: str
    facts: dict

    captions = (None,)


def open_statistics(path: Path) -> Statistics:
    """Those in a file of pytorch-fid, or PaddleMIX's `coco_<side>_<number>.npz`: `mu`, and `sigma` by n - 1. Raises
    DataError."""
    try:
        with np.load(path) as file:
            mean, covariance = (file[name].astype(np.float64) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise DataError(f"{path} is not a file of statistics with mu and sigma ({error}); name another") from error
    if mean.ndim != 1 or covariance.shape != (len(mean),) * 2 or not np.isfinite([mean, *covariance]).all():
        raise DataError(f"{path}: mu {mean.shape} and sigma {covariance.shape} are not finite [D] and [D, D]")
    values, vectors = np.linalg.eigh(covariance)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    digest = sha256(mean.tobytes() + covariance.tobytes()).hexdigest()
    return Statistics(str(path), (mean, root), digest, {"count": "statistics", "size": None, "resize": None})


def open_pictures(where, resolution: int | None = None, limit: int | None = None, seed: int = 0) -> PictureSet:
    """The pictures of a folder, or the rows of a filelist; of more than `limit`, so many that `seed` chooses, in order.
    `facts`: `count`; `size`, "width x height" as handed out, or "mixed"; `resize`, None where none was resized;
    `enlarged`, how many were; `skipped` by reason; `formats`. Raises DataError where there are none."""
    count, read = _open_folder(Path(where)) if Path(where).is_dir() else _open_filelist(where)
    order = range(count)
    if limit is not None and limit < count:
        order = make_rng(seed, Stream.ORDER).permutation(count).tolist()
    found, skipped = [], Counter()
    with progress(total=min(count, limit or count), desc="looking at pictures", unit="picture", delay=3) as bar:
        for number in order:
            if limit is not None and len(found) == limit:
                break
            try:
                found.append(_Found(number, read(number), resolution))
            except RowError as error:
                skipped[error.reason] += 1
            bar.update()
    if not found:
        why = ", ".join(f"{reason}: {times}" for reason, times in skipped.items())
        raise DataError(f"{where} holds no picture that can be read ({why or 'it is empty'}); name another")
    if skipped:
        get_logger().warning("%s: %d pictures cannot be read and are left out", where, sum(skipped.values()))
    found.sort(key=lambda one: one.number)
    resized, sizes = [one for one in found if one.is_resized], {one.size for one in found}
    facts = {
        "count": len(found),
        "size": f"{found[0].size[0]}x{found[0].size[1]}" if len(sizes) == 1 else "mixed",
        "resize": RESIZE if resized else None,
        "enlarged": sum(min(one.stored_size) < resolution for one in resized),
        "skipped": dict(sorted(skipped.items())),
        "formats": ", ".join(sorted({one.format for one in found})),
    }
    first = found[0].drawn
    shared = {name: value for name, value in first.items() if all(one.drawn.get(name) == value for one in found)}
    return PictureSet(
        where=str(where),
        ids=[one.id for one in found],
        captions=[one.caption for one in found],
        digest=_digest([one.id, one.checksum, [RESIZE, one.size] if one.is_resized else None] for one in found),
        requests=_digest(
            [one.caption, {name: one.drawn[name] for name in one.drawn.keys() - shared.keys() - {WEIGHTS}}]
            for one in found
        ),
        drawn=shared,
        facts=facts,
        resolution=resolution,
        numbers=tuple(one.number for one in found),
        read=read,
    )


class _Found:
    """What is kept of a picture of this number. Raises RowError where it cannot be decoded."""

    def __init__(self, number: int, stored: Stored, resolution: int | None):
        self.number, self.id, self.caption, self.drawn = number, stored.id, stored.caption, stored.drawn or {}
        height, width, _ = decode_pixels(stored.image).shape
        self.stored_size = width, height
        self.size = (width, height) if resolution is None else (resolution, resolution)
        self.is_resized = self.size != self.stored_size
        self.format = _FORMATS.get(stored.image[:2], "other")
        self.checksum = sha256(stored.image).hexdigest()


def _digest(facts: Iterable) -> str:
    digest = sha256()
    for fact in facts:
        digest.update(json.dumps(fact, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _open_folder(folder: Path) -> tuple[int, Callable[[int], Stored]]:
    """(number of pictures, reader) of a folder with all below it. Where some carry the settings that they were drawn
    with, the others, such as a grid of them, do not count."""
    try:
        paths = list_pictures(folder, PICTURE_SUFFIXES)
    except OSError as error:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}; check it") from error
    if not paths:
        raise DataError(f"{folder} and what is below it hold no pictures ({', '.join(IMAGE_SUFFIXES)}); name another")
    settings = [read_settings(path, whole=False) if path.suffix.lower() == ".png" else None for path in paths]
    if any(settings):
        kept = [(path, own) for path, own in zip(paths, settings, strict=True) if own]
        places = sorted({path.parent for path, _ in kept})
        if places[0] == folder and len(places) > 1:
            get_logger().warning("%s: drawn pictures of folders below it, such as %s, do not count", folder, places[1])
            kept = [(path, own) for path, own in kept if path.parent == folder]
        elif len(places) > 1:
            raise DataError(f"{folder} holds folders of drawn pictures: name one, such as {places[0]}")
        paths, settings = map(list, zip(*kept, strict=True))

    def read(number: int) -> Stored:
        path, drawn = paths[number], settings[number]
        try:
            image = path.read_bytes()
        except OSError as error:
            raise RowError("unreadable", f"cannot read {path}: {error.strerror}") from error
        if drawn and isinstance(drawn.get("prompt"), str):
            caption = drawn["prompt"]
        else:
            text = find_caption(path)
            caption = decode_caption(text.read_bytes(), str(text)) if text else None
        return Stored(path.relative_to(folder).as_posix(), image, caption, drawn)

    return len(paths), read


def _open_filelist(path) -> tuple[int, Callable[[int], Stored]]:
    named, starts = [], [0]
    for source in read_sources(path):
        for part, summary in zip(source.parts, build_indexes(source.parts, source), strict=True):
            named.append((part, source.without_parts()))
            starts.append(starts[-1] + summary.rows)
    parts = OpenParts(named, _OPEN_PARTS)

    def read(number: int) -> Stored:
        part = bisect_right(starts, number) - 1
        row = parts[part].read(number - starts[part])
        return Stored(f"{parts.path(part).name}:{number - starts[part]}", row.image, row.caption)

    return starts[-1], read
