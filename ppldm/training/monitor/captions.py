"""Said at the start of a run: how well the tokenizer fits the captions that are to be trained on."""

from collections.abc import Iterable, Iterator

import numpy as np

from ...data.dataset import TextImageDataset
from ...data.text.coverage import Coverage, CoverageMeter
from ...utils.errors import RowError
from ...utils.log import get_logger

_NUM_ROWS = 256
_EXAMPLE_LENGTH = 200  # characters
# Above these shares the line is a warning.
_MANY_UNKNOWN, _MANY_CUT = 0.05, 0.2


def measure_captions(dataset: TextImageDataset, num_rows: int = _NUM_ROWS) -> Coverage:
    """The captions of `num_rows` selected rows, or of all where there are fewer, spread evenly; bad rows are left
    out."""
    places = np.linspace(0, len(dataset) - 1, min(num_rows, len(dataset)), dtype=np.int64)
    return CoverageMeter(dataset.tokenizer).measure(list(_captions(dataset, places.tolist())))


def first_caption(dataset: TextImageDataset) -> str | None:
    """A caption that the model has seen, to draw as an example; None where the first rows have none that is short."""
    captions = _captions(dataset, range(min(_NUM_ROWS, len(dataset))))
    return next((caption for caption in captions if 0 < len(caption.strip()) <= _EXAMPLE_LENGTH), None)


def _captions(dataset: TextImageDataset, places: Iterable[int]) -> Iterator[str]:
    for place in places:
        try:
            row = dataset.read_row(dataset.selection[place])
        except RowError:
            continue  # training counts it by its reason
        yield from (row.caption, *row.other_captions)


def report_captions(dataset: TextImageDataset) -> None:
    """Log the shares of unknown words and of captions that are cut, with a remedy where they are large."""
    found, max_length = measure_captions(dataset), dataset.tokenizer.max_length
    remedies = []
    if found.unknown_share > _MANY_UNKNOWN:
        remedies.append("`ppldm vocab` makes a tokenizer that knows them")
    if found.cut_share(max_length) > _MANY_CUT:
        remedies.append("--model_max_length takes longer captions")
    log = get_logger().warning if remedies else get_logger().info
    log("of %d captions, %s%s", found.captions, found.describe(max_length), "".join(f"; {text}" for text in remedies))
