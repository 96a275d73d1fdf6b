"""Said at the start of a run: how well the tokenizer fits the captions that are to be trained on."""

import numpy as np

from ..data.coverage import Coverage, CoverageMeter
from ..data.dataset import TextImageDataset
from ..utils.errors import RowError
from ..utils.log import get_logger

_NUM_ROWS = 256
# Above these shares the line is a warning.
_MANY_UNKNOWN, _MANY_CUT = 0.05, 0.2


def measure_captions(dataset: TextImageDataset, num_rows: int = _NUM_ROWS) -> Coverage:
    """The captions of `num_rows` selected rows, or of all where there are fewer, spread evenly; bad rows are left
    out."""
    captions = []
    for place in np.linspace(0, len(dataset) - 1, min(num_rows, len(dataset)), dtype=np.int64):
        try:
            row = dataset.read_row(dataset.selection[int(place)])
        except RowError:
            continue  # training counts it by its reason
        captions += [row.caption, *row.other_captions]
    return CoverageMeter(dataset.tokenizer).measure(captions)


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
