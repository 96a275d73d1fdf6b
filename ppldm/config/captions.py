"""Which caption a sample has, and what is made of it. Families without captions do not look at these."""

from dataclasses import dataclass
from functools import partial

from ..utils.errors import ConfigError
from .option import Bounds, Needs, option, options, table_text

_data = partial(option, section="data", part_of=True)
_SHARE = Bounds(least=0, most=1)
_with_tags = Needs(
    "--shuffle_tags or --tag_drop_probability", lambda given: given.shuffle_tags or given.tag_drop_probability
)


@dataclass(kw_only=True)
class CaptionOptions:
    """How a caption is drawn from a row (docs/data.md)."""

    captions: dict[str, float] | None = _data(
        None,
        "Texts of a row to choose from, each with its weight: caption (the row's own) and fields of its metadata, as "
        "in caption:0.5,caption_blip:0.5. Default: the row's own.",
        bounds=Bounds(above=0),
    )
    caption_choice: str = _data(
        "random", "Which of several captions of a row, or of a field.", choices=("random", "first")
    )
    caption_drop: float = _data(
        0.1, "Share of captions replaced by the empty one, for classifier-free guidance.", bounds=_SHARE
    )
    caption_wildcards: bool = _data(
        False,
        "Replace each {a|b} of a caption by one of its choices, drawn anew each epoch.",
        also=("enable_wildcard",),
    )
    shuffle_tags: bool = _data(
        False, "Shuffle the tags of a caption, its parts between commas.", also=("shuffle_caption",)
    )
    keep_tags: int = _data(
        0,
        "How many tags at the beginning are never moved or dropped.",
        bounds=Bounds(least=0),
        unit="tags",
        also=("keep_tokens",),
        needs=_with_tags,
    )
    tag_drop_probability: float = _data(
        0.0,
        "Probability with which each tag is left out of a caption.",
        bounds=_SHARE,
        also=("caption_tag_dropout_rate",),
    )
    tag_separator: str = _data(",", "What stands between tags.", also=("caption_separator",), needs=_with_tags)
    keep_tags_separator: str = _data(
        "",
        "Where it is in a caption, tags before it, and behind a second one, are never moved or dropped, whatever "
        "--keep_tags says; it is removed.",
        also=("keep_tokens_separator",),
        needs=_with_tags,
    )
    tag_group_separator: str = _data(
        "",
        "Joins tags that are moved or dropped together; replaced by --tag_separator afterwards.",
        also=("secondary_separator",),
        needs=_with_tags,
    )
    clean_captions: bool = _data(
        False,
        "Clean captions as those of CC12M are cleaned: lower case; no addresses, HTML, file names, article numbers. "
        "Removes Chinese, Japanese and Korean text.",
    )

    def check(self) -> None:
        """Raises ConfigError for separators that do not tell tags apart."""
        separators = [self.tag_separator, self.keep_tags_separator, self.tag_group_separator]
        given = [one for one in separators if one]
        if not self.tag_separator or len(set(given)) < len(given):
            raise ConfigError(
                f"--tag_separator {self.tag_separator!r}, --keep_tags_separator {self.keep_tags_separator!r} and "
                f"--tag_group_separator {self.tag_group_separator!r} must differ, and the first must not be empty"
            )


def caption_identity(given: CaptionOptions) -> dict:
    """All that the caption of a sample depends on, by name, JSON-ready."""
    found = {name: getattr(given, name) for name in options(CaptionOptions)}
    return found | {"captions": table_text(given.captions)}
