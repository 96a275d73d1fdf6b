"""What is trained on: which rows, at which size, in which order. No paddle here."""

from dataclasses import dataclass
from functools import partial

from .option import Bounds, Needs, option

_data = partial(option, section="data")
_validation = partial(option, section="validation")
_SHARE = Bounds(least=0, most=1)


@dataclass(kw_only=True)
class DataOptions:
    """The rows of a run and what is made of them."""

    file_list: str = _data(
        "./data/filelist/train.filelist.list",
        "A list of filelists (one a line, optionally with a weight), or one filelist of parts.",
        kind="file",
    )
    layout: str = _data(
        "default", "Column order of the parts of lists that do not name one themselves (docs/data_format.md)."
    )
    where: str | None = _data(
        None,
        'Train on the rows for which this holds, as in "width>=512 and aesthetic>=5"; @FILE reads it from a file '
        "(docs/data_format.md).",
    )
    resolution: int = _data(
        256, "Side of the square training pictures.", bounds=Bounds(above=0), unit="pixels", identity=True
    )
    num_records: int = _data(
        10000000, "Accepted for older command lines and not used: the number of rows is read from the index."
    )
    buffer_size: int = _data(
        100, "Accepted for older command lines and not used: the order is a windowed shuffle of row numbers."
    )
    shuffle_every_n_samples: int = _data(5, "Accepted for older command lines and not used, as --buffer_size.")
    caption_drop: float = _data(
        0.1, "Share of captions replaced by the empty one, for classifier-free guidance.", bounds=_SHARE
    )
    crop_fraction: float = _data(
        0.9,
        "Side of the crop by the resized picture's short side: 0.9 resizes to 284 to crop 256.",
        bounds=Bounds(above=0, most=1),
        identity=True,
    )
    interpolation: str = _data(
        "lanczos",
        "How pictures are resized: as Pillow does, or area, the mean of the pixels covered, which is faster.",
        choices=("lanczos", "bicubic", "bilinear", "area"),
        identity=True,
    )
    random_crop: bool = _data(True, "Crop at random; otherwise the centre.", identity=True)
    random_flip: bool = _data(False, "Mirror half of the pictures. Mirrors text too.", identity=True)
    max_skipped: int = _data(
        100,
        "Stop after this many unusable rows one after another; 0 stops at the first.",
        bounds=Bounds(least=0),
        unit="rows",
        identity=True,
    )
    max_skipped_share: float = _data(
        0.5,
        "Stop when more than this share of the rows read for the last 1,000 samples was unusable; 1: never.",
        bounds=_SHARE,
        identity=True,
    )
    validation_file_list: str | None = _validation(
        None, "As --file_list, rows that are not trained on: their loss is logged as validation_loss.", kind="file"
    )
    validation_rows: int = _validation(
        256,
        "How many of these rows, spread evenly over them, are looked at.",
        bounds=Bounds(above=0),
        unit="rows",
        needs=Needs("--validation_file_list", lambda given: given.validation_file_list is not None),
    )

    def check(self) -> None:
        """All that can be wrong with these is wrong with one of them."""
