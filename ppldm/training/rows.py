"""Which rows a run trains on, and for how many updates."""

import math
from collections.abc import Iterable
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np

from ..config.data import DataOptions
from ..config.training import TrainingOptions
from ..data.filelist import Source, read_sources
from ..data.formats.open import open_part
from ..data.formats.row import BadRows
from ..data.images.crop import CropRule
from ..data.select.selection import Selection, select_rows
from ..data.shapes import Shape, shape_rule
from ..utils.errors import ConfigError, FilelistError
from ..utils.log import get_logger, quiet_libraries
from ..utils.machine.resources import count_usable_cores
from ..utils.processes.world import World
from ..utils.text import count_of

# Pictures of fewer pixels are decoded fast enough; so many are decoded in a second, of JPEG files on a core.
_LARGE_PIXELS, _DECODED_A_SECOND = 2e6, 2e8
_SIDES_ENOUGH = 2  # times the resolution, which training would not tell from larger ones
_PARTS_MEASURED = 8


def count_steps(arguments: TrainingOptions, num_rows: int, global_batch_size: int) -> int:
    """Updates in all: `max_samples` rounded up to whole batches, or `max_steps`, or the epochs' rows, rounded up.

    Raises ConfigError where samples and steps are given and differ.
    """
    if arguments.max_samples is not None:
        steps = math.ceil(arguments.max_samples / global_batch_size)
        if arguments.max_steps > 0 and arguments.max_steps != steps:
            raise ConfigError(
                f"--max_samples {arguments.max_samples} is {steps} updates of {global_batch_size} samples, and "
                f"--max_steps says {arguments.max_steps}; give one of them (--max_steps -1 and run.max_samples=null "
                "take back what a preset or a file says)"
            )
        return steps
    if arguments.max_steps > 0:
        return arguments.max_steps
    return math.ceil(Fraction(repr(arguments.num_train_epochs)) * num_rows / global_batch_size)  # 0.07 of 100 is 7


def open_sources(arguments: DataOptions, flag: str = "file_list") -> list[Source]:
    """The weighted lists of parts behind `flag`, and a line in the log about them.

    Raises FilelistError that names the flag, and ConfigError for a `--layout` or `--where` that cannot be.
    """
    quiet_libraries()
    read_where(arguments)
    path = getattr(arguments, flag)
    try:
        folder = Path(arguments.latents_dir) if arguments.latents_dir else None
        sources = read_sources(path, arguments.layout, latents=arguments.latents, latents_dir=folder)
    except FilelistError as error:
        raise FilelistError(f"--{flag}: {error}") from error
    num_parts = sum(len(source.parts) for source in sources)
    get_logger().info("%s: %s in %s from %s",
                      "data" if flag == "file_list" else "held out", count_of(num_parts, "part"),
                      count_of(len(sources), "list"), path)  # fmt: skip
    return sources


def select_training_rows(
    sources: list[Source],
    data_arguments: DataOptions,
    arguments: TrainingOptions,
    world: World,
    shapes: Iterable[Shape] | None = None,
) -> Selection:
    """The rows that `--where` holds for and that are no smaller than `--resolution`, or with `--buckets` than one of
    `shapes`, by default the settings'; and a table of shapes, and of the other rows, in the log. Parts without an index
    are indexed first, over all cores. Raises DataError, OutputError."""
    num_workers = max(arguments.dataloader_num_workers, count_usable_cores() // world.size, 1)
    rule = shape_rule(data_arguments, arguments.per_device_train_batch_size, shapes)
    where, min_side = read_where(data_arguments), 0 if rule else data_arguments.resolution
    selection = select_rows(sources, where, min_side, num_workers, rule)
    if selection.skipped or selection.buckets:
        selection.log()
    return selection


def describe_large(sources: list[Source], data: DataOptions) -> tuple[str, str]:
    """(what it costs to decode pictures that are far larger than they are trained at, what to do); empty where that is
    little. Looks at some parts."""
    parts = [(path, source) for source in sources for path in source.parts if source.latents == "off"]
    pixels = []
    for path, source in parts[:: -(-len(parts) // _PARTS_MEASURED) or 1]:
        with closing(open_part(path, source.without_parts())) as part:
            pixels.append(np.asarray(part.widths, np.float64) * part.heights)
    known = np.concatenate([*pixels, np.zeros(0)])
    mean, side = known[known > 0].mean() if known.any() else 0.0, _SIDES_ENOUGH * data.resolution
    if mean < max(_LARGE_PIXELS, 2 * side**2):
        return "", ""
    text = (
        f"pictures have {mean / 1e6:.1f} million pixels on average: a core decodes one in about "
        f"{mean / _DECODED_A_SECOND:.2f} s, and they are trained at {data.resolution} x {data.resolution}"
    )
    return text, f"`ppldm convert FOLDER --out DIR --size {side}` makes them smaller once, nearly without loss"


def bad_row_policy(arguments: DataOptions) -> BadRows:
    """What `--max_skipped` asks for."""
    return BadRows("count", arguments.max_skipped) if arguments.max_skipped > 0 else BadRows("raise", 1)


def crop_rule(data) -> CropRule:
    """What of a picture the settings ask for."""
    return CropRule(
        data.crop_fraction, data.random_crop and not data.smart_crop, data.random_flip, data.interpolation,
        data.num_crops, data.smart_crop, data.bucket_upscale,
    )  # fmt: skip


def read_where(arguments: DataOptions):
    """The condition of `--where`, an Expression, if any. Raises ConfigError."""
    if arguments.where is None:
        return None
    from ..data.select.parse import parse_where

    return parse_where(arguments.where)
