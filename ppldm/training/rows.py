"""Which rows a run trains on, for how many updates, and how well the tokenizer fits their captions."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from ..config.data import DataOptions
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..data.filelist import Source, read_sources
from ..data.formats.open import open_part
from ..data.formats.row import BadRows
from ..data.images import CropRule
from ..data.select.selection import Selection, select_rows
from ..data.shapes import shape_rule
from ..data.text.captions import CaptionRule, Coverage, CoverageMeter
from ..utils.errors import ConfigError, FilelistError, RowError
from ..utils.log import get_logger, quiet_libraries
from ..utils.machine.resources import count_usable_cores
from ..utils.processes.ranks import World
from ..utils.rng import make_rng
from ..utils.text import count_of

# Pictures of fewer pixels are decoded fast enough; so many are decoded in a second, of JPEG files on a core.
_LARGE_PIXELS, _DECODED_A_SECOND = 2e6, 2e8
_SIDES_ENOUGH = 2  # times the resolution, which training would not tell from larger ones
_PARTS_MEASURED = 8
_NUM_ROWS = 256
_EXAMPLE_LENGTH = 200  # characters
# Above these shares the line is a warning.
MANY_UNKNOWN, MANY_CUT, MANY_EMPTY = 0.05, 0.2, 0.2


def count_steps(arguments: TrainingOptions, num_rows: int, global_batch_size: int) -> int:
    """Updates in all: `max_samples` rounded up to whole batches, or `max_steps`, or the epochs' rows, rounded up.
    Raises ConfigError where samples and steps are given and differ."""
    if arguments.max_samples is not None:
        steps = math.ceil(arguments.max_samples / global_batch_size)
        if arguments.max_steps > 0 and arguments.max_steps != steps:
            text = f"--max_samples {arguments.max_samples} is {steps} updates of {global_batch_size} samples, and "
            fix = "give one of them (--max_steps -1 and run.max_samples=null take back what a preset or a file says)"
            raise ConfigError(f"{text}--max_steps says {arguments.max_steps}; {fix}")
        return steps
    if arguments.max_steps > 0:
        return arguments.max_steps
    return math.ceil(Fraction(repr(arguments.num_train_epochs)) * num_rows / global_batch_size)  # 0.07 of 100 is 7


def open_sources(arguments: DataOptions, flag: str = "file_list") -> list[Source]:
    """The weighted lists of parts behind `flag`, and a line in the log about them. Raises FilelistError that names the
    flag, and ConfigError for a `--layout` or `--where` that cannot be."""
    quiet_libraries()
    read_where(arguments)
    path = getattr(arguments, flag)
    try:
        folder = Path(arguments.latents_dir) if arguments.latents_dir else None
        sources = read_sources(path, arguments.layout, latents=arguments.latents, latents_dir=folder)
    except FilelistError as error:
        raise FilelistError(f"--{flag}: {error}") from error
    parts, lists = count_of(sum(len(source.parts) for source in sources), "part"), count_of(len(sources), "list")
    get_logger().info("%s: %s in %s from %s", "data" if flag == "file_list" else "held out", parts, lists, path)
    return sources


def select_training_rows(
    sources: list[Source], data_arguments: DataOptions, arguments: TrainingOptions, world: World, shapes=None
) -> Selection:
    """The rows that `--where` holds for and that are no smaller than `--resolution`, or with `--buckets` than one of
    `shapes`, by default the settings'; and a table of shapes, and of the other rows, in the log. Parts without an index
    are indexed first, over all cores. Raises DataError, OutputError."""
    num_workers = max(arguments.dataloader_num_workers, count_usable_cores() // world.size, 1)
    rule = shape_rule(data_arguments, arguments.per_device_train_batch_size, shapes, arguments.seed)
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


def dataset_maker(data: DataOptions, seed: int, **facts) -> Callable[..., TextImageDataset]:
    """TextImageDataset as the settings ask for, with such `facts`, of sources and a selection."""
    is_random = data.random_crop and not data.smart_crop
    cut = data.crop_fraction, is_random, data.random_flip, data.interpolation, data.num_crops
    crops = CropRule(*cut, data.smart_crop, data.bucket_upscale)
    bad_rows = BadRows("count", data.max_skipped) if data.max_skipped > 0 else BadRows("raise", 1)
    told = {"captions": CaptionRule.of(data), "crops": crops, "bad_rows": bad_rows} | facts
    return partial(TextImageDataset, resolution=data.resolution, seed=seed, **told)


def read_where(arguments: DataOptions):
    """The condition of `--where`, an Expression, if any. Raises ConfigError."""
    if arguments.where is None:
        return None
    from ..data.select.expression import parse_where

    return parse_where(arguments.where)


def measure_captions(dataset: TextImageDataset, num_rows: int = _NUM_ROWS) -> tuple[Coverage, Counter]:
    """(the captions that `num_rows` selected rows have in the first epoch, or all rows where there are fewer, spread
    evenly, without any that is dropped; how many of the rows have none, by the reason). Where one has a word that the
    tokenizer's captions had not, it was made of others: what words these had says nothing here, and is forgotten."""
    bad: Counter = Counter()
    without_drop = replace(dataset.captions, drop_probability=0.0)
    places = np.linspace(0, len(dataset) - 1, min(num_rows, len(dataset)), dtype=np.int64)
    captions = list(_captions(dataset, places.tolist(), without_drop, bad))
    if dataset.tokenizer.unseen_words(captions):
        dataset.tokenizer.seen = None
    return CoverageMeter(dataset.tokenizer).measure(captions), bad


def first_caption(dataset: TextImageDataset) -> str | None:
    """A caption that the model has seen, to draw as an example; None where the first rows have none that is short."""
    rule = replace(dataset.captions.fixed(), choice="first")
    captions = _captions(dataset, range(min(_NUM_ROWS, len(dataset))), rule, Counter())
    return next((caption for caption in captions if 0 < len(caption.strip()) <= _EXAMPLE_LENGTH), None)


def _captions(dataset: TextImageDataset, places: Iterable[int], rule: CaptionRule, bad: Counter) -> Iterator[str]:
    """Of the rows that have one. bad: the others are counted in it; training counts them, too."""
    for place in places:
        number = dataset.selection[place]
        try:
            row = dataset.read_row(number)
            rule.check(row)
        except RowError as error:
            bad[error.reason] += 1
            continue
        yield rule.draw(row, partial(make_rng, dataset.seed, epoch=0, row=number))


def remedies_for(found: Coverage, max_length: int) -> list[str]:
    """What helps where a share is large; nothing where all fits."""
    remedies = []
    if found.empty > MANY_EMPTY * found.captions:
        remedies.append("captions that are empty teach no words: check the data, --captions and the columns' --layout")
    if found.unknown_share > MANY_UNKNOWN:
        remedies.append("`ppldm vocab` makes a tokenizer that knows them")
    if found.cut_share(max_length) > MANY_CUT:
        remedies.append("a larger --model_max_length takes longer captions")
    return remedies


def report_captions(dataset: TextImageDataset) -> None:
    """Log the shares of empty captions, unknown words and cut captions, with a remedy where they are large."""
    (found, _), max_length = measure_captions(dataset), dataset.tokenizer.max_length
    remedies = remedies_for(found, max_length)
    log = get_logger().warning if remedies else get_logger().info
    log("of %d captions, %s%s", found.captions, found.describe(max_length), "".join(f"; {text}" for text in remedies))
