"""What `deflate.decode` keeps between calls, and what it tells: apart from it, since it alone needs numba."""

import numpy as np

WINDOW_BYTES = 1 << 15
# No header of a block is longer, and no symbol writes more than MAX_SYMBOL_BYTES.
MAX_HEADER_BYTES = 400
MAX_SYMBOL_BYTES = 258

# What `decode` returns.
LINE, INPUT, ROOM, MEMBER_END, DAMAGED = range(5)

# The places of `State.numbers`. Positions in the output count from its first byte, those in the input from `data[0]`;
# header bits from the beginning of the file.
(
    POS, BITS, NUM_BITS, OUT, BLOCK, FINAL, REMAINING, MEMBER_START, BASE, HEADER_START, HEADER_STOP, SEGMENT,
    LAST_BIT, LAST_OUT, LAST_DISTANCE, LAST_LENGTH,
) = range(16)  # fmt: skip

NO_BLOCK, STORED, FIXED, DYNAMIC = range(4)

FAST_BITS = 10  # of a code that is looked up at once


class State:
    """What `decode` keeps between calls. `needed`[d]: whether the byte d + 1 before the segment is referred to."""

    def __init__(self):
        self.numbers = np.zeros(16, np.int64)
        self.needed = np.zeros(WINDOW_BYTES, np.uint8)
        self.header = np.zeros(MAX_HEADER_BYTES, np.uint8)
        self.tables = np.zeros((3, 1 << FAST_BITS), np.int64)
        self.counts = np.zeros((3, 16), np.int64)
        self.symbols = np.zeros((3, 320), np.int64)
