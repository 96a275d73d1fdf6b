"""What a file of cached latents was made of, and which file that is.

Latents of one key are the same numbers wherever they are made; those of another key are never used. The name of a file
holds the first digits of its key's digest, its header the whole key, so that a mismatch is said in words.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...config.data import LATENTS_DTYPES
from ...utils.errors import PartError
from ...utils.jobs import find_changes
from ..filelist import Source
from ..fingerprint import read_options
from ..images.crop import CropRule
from ..shapes import ShapeRule

SUFFIX = ".latents"
DTYPES = LATENTS_DTYPES


@dataclass(frozen=True)
class LatentsKey:
    """autoencoder: `weights.components.encoder_digest`. shapes: (height, width) in pixels of the crops, in the order of
    the codes of rows. crops: `CropRule.kind`. upscale: whether pictures may be enlarged. part: bytes and CRC-32 of the
    file with the rows, as its index has them; None for any part, where it is not on this machine. format, layout,
    idx_to_prompt: how its rows are read.

    The scaling factor is no part of it, since moments are stored without.
    """

    autoencoder: str
    shapes: tuple[tuple[int, int], ...]
    crop_fraction: float
    interpolation: str
    crops: str
    flips: bool
    upscale: bool
    dtype: str
    part: tuple[int, int] | None
    format: str
    layout: str | None
    idx_to_prompt: str | None

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

    @classmethod
    def from_facts(cls, facts: dict) -> "LatentsKey":
        """The inverse of `facts`. Raises TypeError, KeyError or ValueError for what are not those of a key."""
        shapes = tuple((int(height), int(width)) for height, width in facts["shapes"])
        part = facts["part"]
        return cls(**{**facts, "shapes": shapes, "part": None if part is None else (int(part[0]), int(part[1]))})

    @property
    def facts(self) -> dict:
        """As JSON holds it."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:32]

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

    def differences(self, other: "LatentsKey") -> list[str]:
        """In what `other`, found, is not this one, wanted, in words; a part that is None is like any other."""
        wanted, found = self.facts, other.facts
        if self.part is None or other.part is None:
            wanted["part"] = found["part"] = None
        return find_changes(found, wanted)

    @property
    def command(self) -> str:
        """What makes latents of this key."""
        if len(self.shapes) == 1 and self.shapes[0][0] == self.shapes[0][1]:
            size = f"--resolutions {self.shapes[0][0]}"
        else:
            size = "--buckets " + ",".join(f"{width}x{height}" for height, width in self.shapes)
        words = f"ppldm precompute FILELIST --vae VAE {size} --crops {self.crops} --dtype {self.dtype}"
        return words + (" --flips" if self.flips else "") + (" --bucket-upscale" if self.upscale else "")


def latents_path(part: Path, key: LatentsKey, folder: Path | None = None) -> Path:
    """The file of a part's latents: beside it, or in `folder`."""
    return (folder or part.parent) / f"{part.name}.{key.digest[:8]}{SUFFIX}"


def find_latents(part: Path, key: LatentsKey, folder: Path | None, read_key: Callable[[Path], LatentsKey]) -> Path:
    """The file of latents of `key` for a part, which need not be on this machine where `key.part` is None.

    read_key: the key of such a file. Raises PartError, which says in what the files that are there differ, and the
    command that makes what is missing.
    """
    path = latents_path(part, key, folder)
    if path.is_file():
        return path
    others = list_latents(path.parent).get(part.name, [])
    if not others:
        raise PartError(f"{part} has no cached latents in {path.parent}; make them with `{key.command}`")
    differences = {other: key.differences(read_key(other)) for other in others}
    same = [other for other, words in differences.items() if not words]
    if len(same) == 1:
        return same[0]
    if same:
        raise PartError(
            f"{path.parent} holds latents of {len(same)} parts named {part.name}, and the part itself is not here to "
            "say which; keep them in folders of their own"
        )
    nearest = min(others, key=lambda other: len(differences[other]))
    raise PartError(
        f"{nearest} was made of something else: {'; '.join(differences[nearest])}; make what this run needs with "
        f"`{key.command}`, or run with what the latents were made of"
    )


def list_latents(folder: Path) -> dict[str, list[Path]]:
    """The files of latents in a folder by the name of their part."""
    try:
        return _list_latents(folder, os.stat(folder).st_mtime_ns)
    except FileNotFoundError:
        return {}


@lru_cache(maxsize=4)
def _list_latents(folder: Path, changed: int) -> dict[str, list[Path]]:
    """Of so many parts, each would else list the whole folder."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not path.name.startswith("."):
            found.setdefault(path.name[: -len(SUFFIX)].rpartition(".")[0], []).append(path)
    return found
