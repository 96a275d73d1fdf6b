"""What a file of cached latents, or of embeddings, was made of. Arrays of one key are the same numbers wherever they
are made; those of another are never used. A file has the first digits of its key's digest in its name, the key in its
header, so that a mismatch is said in words."""

import json
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from ...utils.checksums import digest_of
from ...utils.errors import ConfigError
from ...utils.text import count_of, find_changes
from ..filelist import Source, read_options
from ..images import CropRule
from ..shapes import ShapeRule
from ..text.captions import CaptionRule

Key = TypeVar("Key", bound="CacheKey")


@dataclass(frozen=True)
class Cells:
    """shapes, counts: of each array of a row, and how many it has, by its code. variants: the most that a row has."""

    shapes: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    variants: int


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """What both kinds of key share. dtype: of the arrays. part: bytes and CRC-32 of the file with the rows, as its
    index has them. format, layout, idx_to_prompt: how its rows are read. A run has a key that says nothing of parts
    yet, and one `of_part` for each. `what`, `label`: the arrays, and what they are of, in words. `suffix`: of names of
    files. `command`: what makes them. `depends_on_number`: whether they depend on the number of their row."""

    what: ClassVar[str]
    suffix: ClassVar[str]
    command: ClassVar[str]
    label: ClassVar[str]
    depends_on_number: ClassVar[bool] = False

    dtype: str
    part: tuple[int, int] | None = None
    format: str = ""
    layout: str | None = None
    idx_to_prompt: str | None = None

    def of_part(self: Key, source: Source, content: tuple[int, ...]) -> Key:
        """That of a part of `source` of this content."""
        num_bytes, crc32 = content[:2]
        return replace(self, part=(int(num_bytes), int(crc32)), **read_options(source))

    def cells(self, header: dict) -> Cells:
        """The arrays of a file with this header."""
        raise NotImplementedError

    @classmethod
    def from_facts(cls, facts: dict) -> "CacheKey":
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
        """In what `other`, found, is not this one, wanted, in words."""
        return find_changes(other.facts, self.facts)


@dataclass(frozen=True, kw_only=True)
class LatentsKey(CacheKey):
    """autoencoder: `weights.components.encoder_digest`. shapes: (height, width) in pixels of the crops, in the order of
    the codes of rows. crops: `CropRule.kind`. upscale: whether pictures may be enlarged."""

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
    def of(cls, autoencoder: str, shapes, crops: CropRule, dtype: str) -> "LatentsKey":
        """The key of a run under a rule of crops."""
        return cls(
            autoencoder=autoencoder,
            shapes=tuple((int(height), int(width)) for height, width in shapes),
            crop_fraction=float(crops.fraction),
            interpolation=crops.interpolation,
            crops=crops.kind,
            flips=crops.flip,
            upscale=crops.enlarge,
            dtype=dtype,
        )

    def cells(self, header: dict) -> Cells:
        """Header: `channels`, and `factor`, pixels a side to one latent."""
        channels, factor = header["channels"], header["factor"]
        shapes = tuple((2, channels, height // factor, width // factor) for height, width in self.shapes)
        return Cells(shapes, (self.num_variants,) * len(shapes), self.num_variants)

    @property
    def depends_on_number(self) -> bool:
        return self.crops.isdigit()  # by it the places of enumerated crops are drawn

    @property
    def num_variants(self) -> int:
        """Enumerated crops, twice as many with flips."""
        return (int(self.crops) if self.crops.isdigit() else 1) * (2 if self.flips else 1)

    def find_codes(self, widths: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """The code of each row's shape, uint8, by its sides in pixels; `NO_SHAPE` where none of several will do."""
        if len(self.shapes) == 1:
            return np.zeros(len(widths), np.uint8)
        return ShapeRule(self.shapes, self.upscale).assign(widths, heights)[0]

    @property
    def label(self) -> str:
        (height, width), *others = self.shapes
        return f"crops of {width} x {height}" + (f" and {count_of(len(others), 'other shape')}" if others else "")

    @property
    def command(self) -> str:
        if len(self.shapes) == 1 and self.shapes[0][0] == self.shapes[0][1]:
            size = f"--resolutions {self.shapes[0][0]}"
        else:
            size = "--buckets " + ",".join(f"{width}x{height}" for height, width in self.shapes)
        words = f"ppldm precompute FILELIST --vae VAE {size} --crops {self.crops} --dtype {self.dtype}"
        return words + (" --flips" if self.flips else "") + (" --bucket-upscale" if self.upscale else "")


@dataclass(frozen=True, kw_only=True)
class EmbeddingsKey(CacheKey):
    """text_encoder, tokenizer: `weights.components.text_encoder_digest`, the tokenizer's `digest`. model_max_length:
    tokens of a caption. mask_pad_tokens: whether the encoder sees no padding; False of one that is causal. captions,
    caption_choice, clean_captions: which texts of a row (`CaptionRule.texts`). text_projection: whether the projected
    caption is there too, behind the hidden states, which are then those before the last norm. rows: of a caption by
    several text encoders, whose digests are one (`networks.several_texts.CaptionEncoders`); else 0."""

    what: ClassVar[str] = "text embeddings"
    suffix: ClassVar[str] = ".embeddings"
    label: ClassVar[str] = "captions"

    text_encoder: str
    tokenizer: str
    model_max_length: int
    mask_pad_tokens: bool
    captions: tuple[str, ...] = ()
    caption_choice: str = "random"
    clean_captions: bool = False
    text_projection: bool = False
    rows: int = 0

    def with_captions(self, captions: CaptionRule) -> "EmbeddingsKey":
        """That of a run with these captions. Raises ConfigError for what cannot be enumerated."""
        if captions.tags or captions.wildcards:
            raise ConfigError(
                "captions that are drawn anew in every epoch have no embeddings to cache; omit --shuffle_tags, "
                "--tag_drop_probability and --caption_wildcards, or train with --text_embeddings off"
            )
        names = tuple(name for name, _ in captions.weights)
        return replace(self, captions=names, caption_choice=captions.choice, clean_captions=captions.clean)

    @property
    def facts(self) -> dict:
        """Without what files of earlier versions do not say."""
        return {
            name: value for name, value in super().facts.items() if value or name not in ("text_projection", "rows")
        }

    def cells(self, header: dict) -> Cells:
        """Header: `width` of the hidden states, `variants`, the most texts of a row, whose code is how many it has."""
        counts = tuple(range(header["variants"] + 1))
        length = self.rows or self.model_max_length + self.text_projection
        return Cells(((length, header["width"]),) * len(counts), counts, header["variants"])

    @property
    def command(self) -> str:
        whose = "PIPELINE" if self.rows else "DIR"
        words = f"ppldm precompute FILELIST --text-encoder {whose} --model-max-length {self.model_max_length}"
        words += f" --captions {','.join(f'{name}:1' for name in self.captions)}" if self.captions else ""
        words += f" --caption-choice {self.caption_choice}" if self.caption_choice != "random" else ""
        words += f" --text-dtype {self.dtype}"
        for name in ("clean_captions", "text_projection", "mask_pad_tokens"):
            words += f" --{name.replace('_', '-')}" * getattr(self, name)
        return words


def _frozen(value):
    """Lists of JSON as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
