"""What is trained on: which rows, at which size, in which order. No paddle here."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from ..utils.errors import ConfigError
from .option import FROM_0, Bounds, Needs, Pixels, Positive, Rows, Share, option, options, table_text

LATENTS = ("off", "cached", "ondemand")
EAGER = "eager"  # the engine (`--engine`) that training computes with: Paddle, operation by operation
LATENTS_DTYPES = ("float16", "bfloat16", "float32")

_data = partial(option, section="data")
_caption = partial(_data, part_of=True)
_picture = partial(_data, identity=True)
_validation = partial(option, section="validation")
# Stable Cascade's ratios of width to height, each with its reciprocal.
_RATIOS = ("1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16")
VALIDATION = Needs("--validation_file_list", lambda given: given.validation_file_list is not None)
_TEXTS = Needs("--text_embeddings cached", lambda given: given.text_embeddings != "off")
_BUCKETS = Needs("--buckets", lambda given: given.buckets != "off")
_MADE_BUCKETS = Needs("--buckets ratios or --buckets steps", lambda given: given.buckets in ("ratios", "steps"))
_bucket = partial(_data, needs=_BUCKETS)
_shape = partial(_bucket, part_of="buckets")
_with_tags = Needs(
    "--shuffle_tags or --tag_drop_probability", lambda given: given.shuffle_tags or given.tag_drop_probability
)


@dataclass(kw_only=True)
class CaptionOptions:
    """How a caption is drawn from a row (docs/data.md)."""

    captions: dict[str, Positive] | None = _caption(None)
    """Texts of a row to choose from, each with its weight: caption (the row's own) and fields of its metadata, as in
    caption:0.5,caption_blip:0.5. Default: the row's own."""
    caption_choice: str = _caption("random", choices=("random", "first"))
    "Which of several captions of a row, or of a field."
    caption_drop: Share = _caption(0.1, also=("proportion_empty_prompts",))
    "Share of captions replaced by the empty one, for classifier-free guidance."
    caption_wildcards: bool = _caption(False, also=("enable_wildcard",))
    "Replace each {a|b} of a caption by one of its choices, drawn anew each epoch."
    shuffle_tags: bool = _caption(False, also=("shuffle_caption",))
    "Shuffle the tags of a caption, its parts between commas."
    keep_tags: Annotated[int, FROM_0, "tags"] = _caption(0, also=("keep_tokens",), needs=_with_tags)
    "How many tags at the beginning are never moved or dropped."
    tag_drop_probability: Share = _caption(0.0, also=("caption_tag_dropout_rate",))
    "Probability with which each tag is left out of a caption."
    tag_separator: str = _caption(",", "What stands between tags.", also=("caption_separator",), needs=_with_tags)
    keep_tags_separator: str = _caption("", also=("keep_tokens_separator",), needs=_with_tags)
    """Where it is in a caption, tags before it, and behind a second one, are never moved or dropped, whatever
    --keep_tags says; it is removed."""
    tag_group_separator: str = _caption("", also=("secondary_separator",), needs=_with_tags)
    "Joins tags that are moved or dropped together; replaced by --tag_separator afterwards."
    clean_captions: bool = _caption(False)
    """Clean captions as those of CC12M are cleaned: lower case; no addresses, HTML, file names, article numbers.
    Removes Chinese, Japanese and Korean text."""

    def check(self) -> None:
        """Raises ConfigError for separators that do not tell tags apart."""
        separators = [self.tag_separator, self.keep_tags_separator, self.tag_group_separator]
        given = [one for one in separators if one]
        if not self.tag_separator or len(set(given)) < len(given):
            raise ConfigError(
                f"--tag_separator {self.tag_separator!r}, --keep_tags_separator {self.keep_tags_separator!r} and "
                f"--tag_group_separator {self.tag_group_separator!r} must differ, and the first must not be empty"
            )


@dataclass(kw_only=True)
class RowOptions:
    """The rows of a run and what is made of their pictures."""

    file_list: str = _data("./data/filelist/train.filelist.list", kind="rows", part_of="data", also=("train_data_dir",))
    """A list of filelists (one a line, optionally with a weight), one filelist of parts, or a folder of parts or of
    pictures with captions in files beside them."""
    layout: str = _data("default", part_of="data")
    "Column order of the parts of lists that do not name one themselves (docs/data.md)."
    where: str | None = _data(None, part_of=True)
    """Train on the rows for which this holds, as in "width>=512 and aesthetic>=5"; @FILE reads it from a file
    (docs/data.md)."""
    resolution: Pixels = _picture(256)
    "Side of the square training pictures; with --buckets, the root of about as many pixels as each has."
    buckets: str = _data("off", part_of=True)
    """Train on pictures of several shapes, each in that which cuts least of it away: ratios makes the shapes from
    --bucket_ratios, steps from --bucket_step; or a list of width x height, as 256x256,320x192 (docs/data.md)."""
    bucket_ratios: list[str] = _shape(_RATIOS, needs=Needs("--buckets ratios", lambda given: given.buckets == "ratios"))
    "With --buckets ratios: width by height of the shapes; each stands for its reciprocal too."
    bucket_step: Pixels | None = _shape(None, also=("bucket_reso_steps",), needs=_MADE_BUCKETS)
    "Sides of the shapes are multiples of this (default: 32 of ratios, 64 of steps)."
    bucket_min_side: Pixels | None = _shape(None, also=("min_bucket_reso",))
    "Leave out shapes with a side under this (default: of steps, half of --resolution)."
    bucket_max_side: Pixels | None = _shape(None, also=("max_bucket_reso",))
    "Leave out shapes with a side over this (default: of steps, twice --resolution)."
    max_aspect_ratio: Annotated[float, Bounds(least=1)] | None = _shape(None)
    "Leave out shapes whose long side is over this many short ones."
    bucket_upscale: bool = _bucket(False, opposite=("bucket_no_upscale",), identity=True)
    "Use rows too that must be enlarged for their shape, which are refused otherwise."
    bucket_max_upscale: Annotated[float, Bounds(least=1)] | None = _bucket(
        None, needs=Needs("--bucket_upscale", lambda given: given.bucket_upscale), identity=True
    )
    "How many times larger a row may become for its shape; others are left out as too small (default: any)."
    bucket_random_ratio: Share = _bucket(0.0, also=("bucketeer_random_ratio",), identity=True)
    "Share of the rows that get by chance any of the shapes that they may have, and not the best; once for all epochs."
    bucket_group_size: Rows | None = _bucket(None, part_of=True)
    """Rows of one shape that always come together; shapes with fewer rows are merged into others (default:
    --per_device_train_batch_size)."""
    num_records: int = _data(10000000)
    "Accepted for older command lines and not used: the number of rows is read from the index."
    buffer_size: int = _data(100)
    "Accepted for older command lines and not used: the order is a windowed shuffle of row numbers."
    shuffle_every_n_samples: int = _data(5, "Accepted for older command lines and not used, as --buffer_size.")
    crop_fraction: Annotated[float, Bounds(above=0, most=1)] = _picture(0.9)
    "Side of the crop by the resized picture's short side: 0.9 resizes to 284 to crop 256."
    interpolation: str = _picture("lanczos", choices=("lanczos", "bicubic", "bilinear", "area"))
    "How pictures are resized: as Pillow does, or area, the mean of the pixels covered, which is faster."
    random_crop: bool = _picture(True, "Crop at random; otherwise the centre.", opposite=("center_crop",))
    smart_crop: bool = _picture(False)
    "Crop where the picture has most edges, in place of a random crop or the centre's."
    num_crops: Annotated[int, FROM_0, "crops"] = _picture(
        0, needs=Needs("--random_crop", lambda given: given.random_crop)
    )
    "Of how many places of a picture, the same in every epoch, its random crop is drawn; 0: of all."
    random_flip: bool = _picture(False, "Mirror half of the pictures. Mirrors text too.")
    latents: str = _data("off", choices=LATENTS, part_of=True)
    """Train on cached latents in place of pictures: cached, those of `ppldm precompute`; ondemand, computed and kept as
    rows are met. A filelist of its own may say otherwise: latents=off (docs/latents.md)."""
    latents_dir: str | None = _data(None, "Where cached latents lie (default: each file beside its part).", kind="path")
    latents_dtype: str = _data("float16", choices=LATENTS_DTYPES, part_of="latents")
    "How latents are kept in their cache."
    text_embeddings: str = _data("off", choices=("off", "cached"), part_of=True)
    """Train on embeddings of captions that `ppldm precompute --text-encoder` made; for a text encoder that is not
    trained (docs/latents.md). They lie where latents do."""
    text_embeddings_dtype: str = _data("float16", choices=LATENTS_DTYPES, needs=_TEXTS, part_of="text_embeddings")
    "How text embeddings are kept in their cache."
    max_skipped: Annotated[int, FROM_0, "rows"] = _picture(100)
    "Stop after this many unusable rows one after another; 0 stops at the first."
    max_skipped_share: Share = _picture(0.5)
    "Stop when more than this share of the rows read for the last 1,000 samples was unusable; 1: never."
    validation_file_list: str | None = _validation(None, kind="rows")
    "As --file_list, rows that are not trained on: their loss is logged as validation_loss."
    validation_rows: Rows = _validation(256, needs=VALIDATION)
    "How many of these rows, spread evenly over them, are looked at."

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        if self.latents != "off" and self.random_crop and not (self.num_crops or self.smart_crop):
            raise ConfigError(
                f"--latents {self.latents} is for crops that are known ahead, not for any place of a picture; add "
                "--random_crop false, or --num_crops N as given to `ppldm precompute --crops N`"
            )
        if self.latents != "off" and (self.bucket_random_ratio or self.bucket_max_upscale):
            others = "--bucket_random_ratio and --bucket_max_upscale"
            raise ConfigError(f"--latents {self.latents} is of each row's best shape; omit it, or omit {others}")


@dataclass(kw_only=True)
class DataOptions(CaptionOptions, RowOptions):
    """The rows of a run and what is made of them."""

    def check(self) -> None:
        """Raises ConfigError for what does not go together."""
        RowOptions.check(self)
        CaptionOptions.check(self)
        drawn = self.shuffle_tags or self.tag_drop_probability or self.caption_wildcards
        if self.text_embeddings != "off" and drawn:
            raise ConfigError(
                "--text_embeddings cached is for captions that are known ahead; omit --shuffle_tags, "
                "--tag_drop_probability and --caption_wildcards"
            )


def caption_identity(given: CaptionOptions) -> dict:
    """All that the caption of a sample depends on, by name, JSON-ready."""
    return {name: getattr(given, name) for name in options(CaptionOptions)} | {"captions": table_text(given.captions)}
