"""Said at the start of a run: how well the tokenizer fits the captions that are to be trained on."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ...data.dataset import TextImageDataset
from ...data.text.captions import CaptionRule
from ...data.text.coverage import Coverage, CoverageMeter
from ...utils.errors import RowError
from ...utils.log import get_logger
from ...utils.rng import make_rng

_NUM_ROWS = 256
_EXAMPLE_LENGTH = 200  # characters
# Above these shares the line is a warning.
MANY_UNKNOWN, MANY_CUT, MANY_EMPTY = 0.05, 0.2, 0.2


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
    """Log the shares of empty captions, of unknown words and of captions that are cut, with a remedy where they are
    large."""
    (found, _), max_length = measure_captions(dataset), dataset.tokenizer.max_length
    remedies = remedies_for(found, max_length)
    log = get_logger().warning if remedies else get_logger().info
    log("of %d captions, %s%s", found.captions, found.describe(max_length), "".join(f"; {text}" for text in remedies))
