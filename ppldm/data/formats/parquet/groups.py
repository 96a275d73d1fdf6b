"""Rows of a parquet file by row group: what pyarrow reads of it at least."""

from .byte_cache import ByteCache

_BATCH_ROWS = 64
_LARGE_GROUP_BYTES = 64 << 20


class GroupReader:
    """Rows of a pyarrow ParquetFile, a row group at a time, or, of a large one, the batches up to the row.

    groups: metadata of each. starts: int64 [groups + 1], their first rows. cache: for groups. Raises what pyarrow does.
    """

    def __init__(self, table, groups: list, starts, cache: ByteCache):
        self._table, self._starts, self._cache = table, starts, cache
        self._bytes = [group.total_byte_size for group in groups]
        self._batches = None  # of a large group: (group, what is left of its batches)
        self._first, self._batch = 0, None

    def read(self, group: int, row: int):
        """A pyarrow table or batch of one row."""
        if self._bytes[group] > _LARGE_GROUP_BYTES:
            rows, first = self._read_batch(group, row)
        else:
            rows, first = self._cache.get((self, group), lambda: self.read_columns(group, None)), self._starts[group]
        return rows.slice(row - int(first), 1)

    def read_columns(self, group: int, paths: list[str] | None) -> tuple:
        """(pyarrow table of the columns with these paths, or of all, in a group; its bytes)."""
        rows = self._table.read_row_group(group, paths, use_threads=False)
        return rows, rows.nbytes

    def close(self) -> None:
        """Give memory back."""
        self._cache.drop(self)
        self._batches = self._batch = None

    def _read_batch(self, group: int, row: int):
        """The batch with a row, found by reading on from the last one where it comes after it."""
        if self._batches is None or self._batches[0] != group or row < self._first:
            batches = self._table.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
            self._batches, self._batch, self._first = (group, batches), None, int(self._starts[group])
        while self._batch is None or row >= self._first + self._batch.num_rows:
            self._first += 0 if self._batch is None else self._batch.num_rows
            self._batch = next(self._batches[1])
        return self._batch, self._first
