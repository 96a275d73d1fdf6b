"""What a file of cached latents, or of embeddings of captions, was made of, and which file that is.

Arrays of one key are the same numbers wherever they are made; those of another key are never used. The name of a file
holds the first digits of its key's digest, its header the whole key, so that a mismatch is said in words.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from ...config.data import LATENTS_DTYPES
from ...utils.checksums import digest_of
from ...utils.errors import PartError
from ...utils.text import find_changes
from ..filelist import Source
from ..fingerprint import read_options
from ..images.crop import CropRule
from ..shapes import ShapeRule

DTYPES = LATENTS_DTYPES
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Cells:
    """The arrays of the rows of a file. shapes, counts: by the code of a row, of each of its arrays, and how many it
    has. variants: the most that a row has."""

    shapes: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    variants: int


@dataclass(frozen=True)
class CacheKey:
    """What both kinds of key share. dtype: of the arrays. part: bytes and CRC-32 of the file with the rows, as its
    index has them; None for any part, where it is not on this machine. format, layout, idx_to_prompt: how its rows are
    read.

    Of a subclass, what: its arrays in words; suffix: of names of files; command: what makes them.
    """

    what: ClassVar[str]
    suffix: ClassVar[str]
    command: ClassVar[str]

    dtype: str
    part: tuple[int, int] | None
    format: str
    layout: str | None
    idx_to_prompt: str | None

    @property
    def depends_on_number(self) -> bool:
        """Whether arrays depend on the number of their row in its part."""
        return False

    def cells(self, header: dict) -> Cells:
        """The arrays of a file with this header."""
        raise NotImplementedError

    @classmethod
    def from_facts(cls, facts: dict) -> "CacheKey":
        """The inverse of `facts`. Raises TypeError, KeyError or ValueError for what are not those of a key."""
        return cls(**{name: _frozen(value) for name, value in facts.items()})

    @property
    def facts(self) -> dict:
        """As JSON holds it."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest_of(self.facts)

    def differences(self, other: "CacheKey") -> list[str]:
        """In what `other`, found, is not this one, wanted, in words; a part that is None is like any other."""
        wanted, found = self.facts, other.facts
        if self.part is None or other.part is None:
            wanted["part"] = found["part"] = None
        return find_changes(found, wanted)


@dataclass(frozen=True)
class LatentsKey(CacheKey):
    """autoencoder: `weights.components.encoder_digest`. shapes: (height, width) in pixels of the crops, in the order of
    the codes of rows. crops: `CropRule.kind`. upscale: whether pictures may be enlarged.

    The scaling factor is no part of it, since moments are stored without.
    """

    what: ClassVar[str] = "latents"
    suffix: ClassVar[str] = ".latents"

    autoencoder: str
    shapes: tuple[tuple[int, int], ...]
    crop_fraction: float
    interpolation: str
    crops: str
    flips: bool
    upscale: bool

    @classmethod
    def of(
        cls, autoencoder: str, shapes, crops: CropRule, dtype: str, source: Source, part: tuple[int, int] | None
    ) -> "LatentsKey":
        """The key of a part of `source` under a rule of crops."""
        return cls(
            autoencoder=autoencoder,
            shapes=tuple((int(height), int(width)) for height, width in shapes),
            crop_fraction=float(crops.fraction),
            interpolation=crops.interpolation,
            crops=crops.kind,
            flips=crops.flip,
            upscale=crops.enlarge,
            dtype=dtype,
            part=None if part is None else (int(part[0]), int(part[1])),
            **read_options(source),
        )

    def find_alike(self, part: Path, folder: Path | None, read_key: Callable[[Path], CacheKey]) -> list[Path]:
        """The files of a part whose rows are as of this key, whichever shapes they have; the key's own file first.
        read_key: the key of such a file."""
        own, alike = cached_path(part, self, folder), []
        for path in list_cached(own.parent).get(part.name, ()):
            with suppress(PartError):  # a damaged one, which serves nobody
                if path != own and not replace(self, shapes=(key := read_key(path)).shapes).differences(key):
                    alike.append(path)
        return [own] * own.is_file() + alike

    def cells(self, header: dict) -> Cells:
        """Header: `channels`, and `factor`, pixels a side to one latent."""
        channels, factor = header["channels"], header["factor"]
        shapes = tuple((2, channels, height // factor, width // factor) for height, width in self.shapes)
        return Cells(shapes, (self.num_variants,) * len(shapes), self.num_variants)

    @property
    def depends_on_number(self) -> bool:
        """By it the places of enumerated crops are drawn."""
        return self.crops.isdigit()

    @property
    def num_variants(self) -> int:
        """Enumerated crops, twice as many with flips."""
        return (int(self.crops) if self.crops.isdigit() else 1) * (2 if self.flips else 1)

    def find_codes(self, widths: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """The code of each row's shape, uint8, by its picture's sides in pixels; all have one where there is but one,
        else `shapes.NO_SHAPE` where none will do."""
        if len(self.shapes) == 1:
            return np.zeros(len(widths), np.uint8)
        return ShapeRule(self.shapes, self.upscale).assign(widths, heights)[0]

    @property
    def command(self) -> str:
        """What makes latents of this key."""
        if len(self.shapes) == 1 and self.shapes[0][0] == self.shapes[0][1]:
            size = f"--resolutions {self.shapes[0][0]}"
        else:
            size = "--buckets " + ",".join(f"{width}x{height}" for height, width in self.shapes)
        words = f"ppldm precompute FILELIST --vae VAE {size} --crops {self.crops} --dtype {self.dtype}"
        return words + (" --flips" if self.flips else "") + (" --bucket-upscale" if self.upscale else "")


@dataclass(frozen=True)
class EmbeddingsKey(CacheKey):
    """text_encoder, tokenizer: `weights.components.text_encoder_digest`, `data.text.tokenizer.tokenizer_digest`.
    model_max_length: tokens of a caption. mask_pad_tokens: whether the encoder sees no padding; False of one that is
    causal, to which it does not matter. captions, caption_choice, clean_captions: which of a row's texts there are, in
    which order, and what is made of them (`data.text.captions.CaptionRule.texts`). text_projection: whether the
    projected caption is there too, behind the hidden states, which are then those before the last norm.
    """

    what: ClassVar[str] = "text embeddings"
    suffix: ClassVar[str] = ".embeddings"

    text_encoder: str
    tokenizer: str
    model_max_length: int
    mask_pad_tokens: bool
    captions: tuple[str, ...]
    caption_choice: str
    clean_captions: bool
    text_projection: bool = False

    @property
    def facts(self) -> dict:
        """Without what files of earlier versions do not say."""
        return {name: value for name, value in super().facts.items() if value or name != "text_projection"}

    def cells(self, header: dict) -> Cells:
        """Header: `width` of the hidden states, `variants`, the most texts of a row; the code of a row is how many it
        has."""
        counts = tuple(range(header["variants"] + 1))
        length = self.model_max_length + self.text_projection
        return Cells(((length, header["width"]),) * len(counts), counts, header["variants"])

    @property
    def command(self) -> str:
        """What makes embeddings of this key."""
        words = f"ppldm precompute FILELIST --text-encoder DIR --model-max-length {self.model_max_length}"
        words += f" --captions {','.join(f'{name}:1' for name in self.captions)}" if self.captions else ""
        words += f" --caption-choice {self.caption_choice}" if self.caption_choice != "random" else ""
        words += f" --text-dtype {self.dtype}" + (" --clean-captions" if self.clean_captions else "")
        words += " --text-projection" if self.text_projection else ""
        return words + (" --mask-pad-tokens" if self.mask_pad_tokens else "")


def cached_path(part: Path, key: CacheKey, folder: Path | None = None) -> Path:
    """The file of a part's arrays: beside it, or in `folder`."""
    return (folder or part.parent) / f"{part.name}.{key.digest[:8]}{key.suffix}"


def unfinished_path(target: Path) -> Path:
    """Where a cached file is made before it gets its name."""
    return target.with_name(f".{target.name}{_UNFINISHED}")


def find_cached(part: Path, key: CacheKey, folder: Path | None, read_key: Callable[[Path], CacheKey]) -> Path:
    """The file of `key` for a part, which need not be on this machine where `key.part` is None.

    read_key: the key of such a file. Raises PartError, which says in what the files that are there differ, and the
    command that makes what is missing.
    """
    path = cached_path(part, key, folder)
    if path.is_file():
        return path
    others = list_cached(path.parent, key.suffix).get(part.name, [])
    if not others:
        raise PartError(f"{part} has no cached {key.what} in {path.parent}; make them with `{key.command}`")
    differences = {other: key.differences(read_key(other)) for other in others}
    same = [other for other, words in differences.items() if not words]
    if len(same) == 1:
        return same[0]
    if same:
        raise PartError(
            f"{path.parent} holds {key.what} of {len(same)} parts named {part.name}, and the part itself is not here "
            "to say which; keep them in folders of their own"
        )
    nearest = min(others, key=lambda other: len(differences[other]))
    raise PartError(
        f"{nearest} was made of something else: {'; '.join(differences[nearest])}; make what this run needs with "
        f"`{key.command}`, or run with what the {key.what} were made of"
    )


def list_cached(folder: Path, suffix: str = LatentsKey.suffix) -> dict[str, list[Path]]:
    """The files of one kind in a folder by the name of their part."""
    try:
        return _list_cached(folder, suffix, os.stat(folder).st_mtime_ns)
    except FileNotFoundError:
        return {}


@lru_cache(maxsize=8)
def _list_cached(folder: Path, suffix: str, changed: int) -> dict[str, list[Path]]:
    """Of so many parts, each would else list the whole folder."""
    found = {}
    for path in sorted(folder.glob(f"*{suffix}")):
        if not path.name.startswith("."):
            found.setdefault(path.name[: -len(suffix)].rpartition(".")[0], []).append(path)
    return found


def list_files(folder: Path) -> dict[str, list[Path]]:
    """The cached files of both kinds in a folder by the name of their part, those too that nobody has finished."""
    found = {}
    for path in sorted(folder.glob("*")):
        target = path.name.removesuffix(_UNFINISHED)
        target = target if target == path.name else target.removeprefix(".")
        if target.endswith((LatentsKey.suffix, EmbeddingsKey.suffix)) and not target.startswith("."):
            found.setdefault(target.rpartition(".")[0].rpartition(".")[0], []).append(path)
    return found


def _frozen(value):
    """Lists of JSON as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
