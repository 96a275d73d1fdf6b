"""Deflate data (RFC 1951) decoded with the bit position of every line, which zlib does not tell.

`gzip.seek_points` enters a stream at the symbol that begins a line. For that it needs where this symbol is, the
header of its block, which holds the Huffman codes, and those of the 32 KiB before it that are referred to. `decode`
finds all three. It refuses what zlib refuses. Compiled by numba at its first use, in a few seconds.
"""

import numpy as np
from numba import njit

from .decoder_state import (
    BASE,
    BITS,
    BLOCK,
    DAMAGED,
    DYNAMIC,
    FAST_BITS,
    FINAL,
    FIXED,
    HEADER_START,
    HEADER_STOP,
    INPUT,
    LAST_BIT,
    LAST_DISTANCE,
    LAST_LENGTH,
    LAST_OUT,
    LINE,
    MAX_HEADER_BYTES,
    MAX_SYMBOL_BYTES,
    MEMBER_END,
    MEMBER_START,
    NO_BLOCK,
    NUM_BITS,
    OUT,
    POS,
    REMAINING,
    ROOM,
    SEGMENT,
    STORED,
    State,
)

_NEWLINE = 10
_ORDER = np.array([16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15], np.int64)
_LENGTH_BASE = np.array(
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258],
    np.int64,
)
_LENGTH_BITS = np.array([0] * 8 + [n for n in range(1, 6) for _ in range(4)] + [0], np.int64)
_DISTANCE_BITS = np.array([0, 0] + [n for n in range(14) for _ in range(2)], np.int64)
_DISTANCE_BASE = np.array([1 + sum(1 << int(n) for n in _DISTANCE_BITS[:i]) for i in range(30)], np.int64)


def _compiled(function):
    """As numba compiles it, kept for the next process where there is a folder for that."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def decode(state: State, data: np.ndarray, size: int, at_end: bool, out: np.ndarray) -> int:
    """Decode into `out` until a newline was written (LINE), data[:size] is used up (INPUT), there may be no room for
    another symbol (ROOM), a member ends (MEMBER_END) or the data is not deflate data (DAMAGED).

    data, out: uint8. at_end: whether no more data follow; then INPUT means that they are cut.
    """
    return _decode(
        state.numbers, state.needed, state.header, state.tables, state.counts, state.symbols, data, size, at_end, out
    )


@_compiled
def _decode(s, needed, header, tables, counts, symbols, data, size, at_end, out):
    while True:
        if s[BLOCK] == NO_BLOCK:
            if s[FINAL]:
                s[FINAL] = 0
                return MEMBER_END
            if not at_end and size - s[POS] < MAX_HEADER_BYTES:
                return INPUT
            code = _read_header(s, header, tables, counts, symbols, data, size)
        elif s[BLOCK] == STORED:
            code = _copy_stored(s, data, size, out)
        else:
            code = _decode_symbols(s, needed, tables, counts, symbols, data, size, at_end, out)
        if code >= 0:
            return code


@_compiled
def _take(s, data, size, count):
    """`count` bits, at most 16; -1 where there are no more."""
    while s[NUM_BITS] < count:
        if s[POS] >= size:
            return -1
        s[BITS] |= np.int64(data[s[POS]]) << s[NUM_BITS]
        s[POS] += 1
        s[NUM_BITS] += 8
    value = s[BITS] & ((1 << count) - 1)
    s[BITS] >>= count
    s[NUM_BITS] -= count
    return value


@_compiled
def _position(s):
    """Of the next bit, in the file."""
    return 8 * (s[BASE] + s[POS]) - s[NUM_BITS]


@_compiled
def _read_header(s, header, tables, counts, symbols, data, size):
    """-1, or INPUT or DAMAGED."""
    start = _position(s)
    final, kind = _take(s, data, size, 1), _take(s, data, size, 2)
    if final < 0 or kind < 0:
        return INPUT
    s[FINAL] = final
    lengths = np.zeros(320, np.int64)
    if kind == 0:
        _take(s, data, size, s[NUM_BITS] & 7)
        length, complement = _take(s, data, size, 16), _take(s, data, size, 16)
        if length < 0 or complement < 0:
            return INPUT
        if length != complement ^ 0xFFFF:
            return DAMAGED
        s[BLOCK], s[REMAINING] = STORED, length
        return -1
    if kind == 1:
        for symbol in range(320):
            lengths[symbol] = (
                8 if symbol < 144 else 9 if symbol < 256 else 7 if symbol < 280 else 8 if symbol < 288 else 5
            )
        _build(lengths, 0, 288, tables[0], counts[0], symbols[0], False)
        _build(lengths, 288, 320, tables[1], counts[1], symbols[1], False)
        s[BLOCK] = FIXED
    elif kind == 2:
        code = _read_codes(s, lengths, tables, counts, symbols, data, size)
        if code >= 0:
            return code
        s[BLOCK] = DYNAMIC
    else:
        return DAMAGED
    s[HEADER_START], s[HEADER_STOP] = start, _position(s)
    first = (start >> 3) - s[BASE]
    last = (s[HEADER_STOP] + 7 >> 3) - s[BASE]
    for i in range(last - first):
        header[i] = data[first + i]
    return -1


@_compiled
def _read_codes(s, lengths, tables, counts, symbols, data, size):
    literals, distances, codes = _take(s, data, size, 5), _take(s, data, size, 5), _take(s, data, size, 4)
    if literals < 0 or distances < 0 or codes < 0:
        return INPUT
    literals, distances, codes = literals + 257, distances + 1, codes + 4
    if literals > 286 or distances > 30:
        return DAMAGED
    for i in range(codes):
        length = _take(s, data, size, 3)
        if length < 0:
            return INPUT
        lengths[_ORDER[i]] = length
    if not _build(lengths, 0, 19, tables[2], counts[2], symbols[2], True):
        return DAMAGED
    for i in range(19):
        lengths[i] = 0
    place = 0
    while place < literals + distances:
        symbol = _slow_symbol(s, counts[2], symbols[2], data, size)
        if symbol < 0:
            return INPUT if symbol == -1 else DAMAGED
        if symbol < 16:
            lengths[place] = symbol
            place += 1
            continue
        value = 0
        if symbol == 16:
            if place == 0:
                return DAMAGED
            value = lengths[place - 1]
            extra, least = 2, 3
        elif symbol == 17:
            extra, least = 3, 3
        else:
            extra, least = 7, 11
        repeat = _take(s, data, size, extra)
        if repeat < 0:
            return INPUT
        repeat += least
        if place + repeat > literals + distances:
            return DAMAGED
        for _ in range(repeat):
            lengths[place] = value
            place += 1
    if lengths[256] == 0:
        return DAMAGED
    if not _build(lengths, 0, literals, tables[0], counts[0], symbols[0], False):
        return DAMAGED
    if not _build(lengths, literals, literals + distances, tables[1], counts[1], symbols[1], False):
        return DAMAGED
    return -1


@_compiled
def _build(lengths, begin, end, table, counts, symbols, must_be_complete):
    """The canonical code of lengths[begin:end], with entries symbol << 4 | length; False where zlib would refuse it."""
    for length in range(16):
        counts[length] = 0
    for place in range(begin, end):
        counts[lengths[place]] += 1
    counts[0] = 0
    left, longest, offsets = 1, 0, np.zeros(17, np.int64)
    for length in range(1, 16):
        left = 2 * left - counts[length]
        if left < 0:
            return False
        offsets[length + 1] = offsets[length] + counts[length]
        if counts[length]:
            longest = length
    if left > 0 and longest > 0 and (must_be_complete or longest != 1):
        return False
    for place in range(1 << FAST_BITS):
        table[place] = 0
    code, codes = 0, np.zeros(16, np.int64)
    for length in range(1, 16):
        code = (code + counts[length - 1]) << 1
        codes[length] = code
    for symbol in range(end - begin):
        length = lengths[begin + symbol]
        if length == 0:
            continue
        symbols[offsets[length]] = symbol
        offsets[length] += 1
        if length <= FAST_BITS:
            turned, code = 0, codes[length]
            for _ in range(length):
                turned = turned << 1 | code & 1
                code >>= 1
            for place in range(turned, 1 << FAST_BITS, 1 << length):
                table[place] = symbol << 4 | length
        codes[length] += 1
    return True


@_compiled
def _slow_symbol(s, counts, symbols, data, size):
    """The next symbol, bit by bit; -1 where the data end, -2 for a code that stands for nothing."""
    code, first, index = 0, 0, 0
    for length in range(1, 16):
        bit = _take(s, data, size, 1)
        if bit < 0:
            return -1
        code |= bit
        if code - counts[length] < first:
            return symbols[index + code - first]
        index += counts[length]
        first = (first + counts[length]) << 1
        code <<= 1
    return -2


@_compiled
def _copy_stored(s, data, size, out):
    """-1 at the end of the block."""
    s[POS] -= s[NUM_BITS] >> 3
    s[BITS] = s[NUM_BITS] = 0
    while s[REMAINING]:
        if s[POS] >= size:
            return INPUT
        if s[OUT] >= len(out):
            return ROOM
        byte = data[s[POS]]
        out[s[OUT]] = byte
        s[POS] += 1
        s[OUT] += 1
        s[REMAINING] -= 1
        if byte == _NEWLINE:
            s[LAST_LENGTH] = 0
            return LINE
    s[BLOCK] = NO_BLOCK
    return -1


@_compiled
def _read_distance(s, distances, counts, symbols, data, size):
    """How far back a copy lies; -1 where the input ends, -2 where it is damaged."""
    entry = distances[s[BITS] & ((1 << FAST_BITS) - 1)]
    if entry and entry & 15 <= s[NUM_BITS]:
        s[BITS] >>= entry & 15
        s[NUM_BITS] -= entry & 15
        symbol = entry >> 4
    else:
        symbol = _slow_symbol(s, counts, symbols, data, size)
    if symbol < 0 or symbol > 29:
        return -1 if symbol == -1 else -2
    extra = _take(s, data, size, _DISTANCE_BITS[symbol])
    return -1 if extra < 0 else _DISTANCE_BASE[symbol] + extra


@_compiled
def _copy(out, end, distance, length, needed, segment):
    """Repeat `length` bytes from `distance` back; whether a newline is among them. Marks what it `needed` of before
    the segment."""
    found, source = False, end - distance
    for i in range(length):
        if source + i < segment:
            needed[segment - 1 - source - i] = 1
        byte = out[source + i]
        out[end + i] = byte
        found |= byte == _NEWLINE
    return found


@_compiled
def _decode_symbols(s, needed, tables, counts, symbols, data, size, at_end, out):
    """-1 at the end of the block."""
    literals, distances = tables[0], tables[1]
    pos, bits, num_bits, end = s[POS], s[BITS], s[NUM_BITS], s[OUT]
    segment, member, mask = s[SEGMENT], s[MEMBER_START], (1 << FAST_BITS) - 1
    code = -1
    while True:
        if end + MAX_SYMBOL_BYTES > len(out) or (pos + 8 > size and not at_end):
            code = ROOM if end + MAX_SYMBOL_BYTES > len(out) else INPUT
            break
        while num_bits <= 48 and pos < size:
            bits |= np.int64(data[pos]) << num_bits
            pos += 1
            num_bits += 8
        start = 8 * (s[BASE] + pos) - num_bits
        entry = literals[bits & mask]
        length = entry & 15
        if entry and length <= num_bits:
            bits >>= length
            num_bits -= length
            symbol = entry >> 4
        else:
            s[POS], s[BITS], s[NUM_BITS] = pos, bits, num_bits
            symbol = _slow_symbol(s, counts[0], symbols[0], data, size)
            pos, bits, num_bits = s[POS], s[BITS], s[NUM_BITS]
            if symbol < 0:
                code = INPUT if symbol == -1 else DAMAGED
                break
        if symbol < 256:
            out[end] = symbol
            end += 1
            if symbol == _NEWLINE:
                s[LAST_BIT], s[LAST_OUT], s[LAST_LENGTH] = start, end - 1, 1
                code = LINE
                break
            continue
        if symbol == 256:
            s[BLOCK] = NO_BLOCK
            break
        if symbol > 285:
            code = DAMAGED
            break
        s[POS], s[BITS], s[NUM_BITS] = pos, bits, num_bits
        extra = _take(s, data, size, _LENGTH_BITS[symbol - 257])
        distance = -1 if extra < 0 else _read_distance(s, distances, counts[1], symbols[1], data, size)
        pos, bits, num_bits = s[POS], s[BITS], s[NUM_BITS]
        if distance < 0 or end - distance < member:
            code = INPUT if distance == -1 else DAMAGED
            break
        length = _LENGTH_BASE[symbol - 257] + extra
        found = _copy(out, end, distance, length, needed, segment)
        if found:
            s[LAST_BIT], s[LAST_OUT], s[LAST_DISTANCE], s[LAST_LENGTH] = start, end, distance, length
            end += length
            code = LINE
            break
        end += length
    s[POS], s[BITS], s[NUM_BITS], s[OUT] = pos, bits, num_bits, end
    return code
