"""How many values come more than once among any number of them, in bounded memory.

Values are kept by 64-bit hashes. Once more than `MOST` different ones are kept, only those whose hash ends in a zero
bit stay, then two, and so on: every value is kept with all its copies or not at all, and what is kept, times two for
each bit, estimates the whole (P. Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries",
2001). What is kept depends on the values alone, not on their order or on how they were split.
"""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

from ...utils.errors import DataError

MOST = 1 << 18


@dataclass
class Copies:
    """rows: how many values were added. bits: zero bits that a hash must end with to be kept, in `counts`."""

    rows: int = 0
    bits: int = 0
    counts: Counter = field(default_factory=Counter)

    def add(self, value: str) -> None:
        """Count one value."""
        self.rows += 1
        number = int.from_bytes(blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        if not number & ((1 << self.bits) - 1):
            self.counts[number] += 1
            self._shrink()

    def merge(self, other: "Copies") -> None:
        """Count what another has counted."""
        self.rows, self.bits = self.rows + other.rows, max(self.bits, other.bits)
        self.counts.update(other.counts)
        self._shrink(self.bits)

    def report(self) -> dict:
        """{rows, distinct, repeated: values that come more than once, extra: rows beyond the first of each,
        sampled_share: of the values, 1 where all were kept and nothing is an estimate}."""
        repeated = [count for count in self.counts.values() if count > 1]
        extra = sum(repeated) - len(repeated)
        found = {"distinct": len(self.counts), "repeated": len(repeated), "extra": extra}
        return {"rows": self.rows, **{name: count << self.bits for name, count in found.items()},
                "sampled_share": 0.5**self.bits}  # fmt: skip

    def _shrink(self, bits: int = 0) -> None:
        while bits or len(self.counts) > MOST:
            self.bits += not bits
            mask = (1 << self.bits) - 1
            self.counts = Counter({number: count for number, count in self.counts.items() if not number & mask})
            bits = 0


def read_labels(path: str, num_rows: int) -> dict:
    """What `Copies.report` says, of the pictures in a labels.parquet of `ppldm dedup`. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["kept", "cluster"], partitioning=None)
        kept, clusters = table["kept"].drop_null().to_numpy(), table["cluster"].drop_null().unique()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as labels; name labels.parquet of `ppldm dedup`") from error
    if table.num_rows != num_rows:
        raise DataError(f"{path} labels {table.num_rows} rows of {num_rows}; run `ppldm dedup` on the same lists")
    distinct = int(kept.sum())
    return {"rows": len(kept), "distinct": distinct, "repeated": len(clusters), "extra": len(kept) - distinct,
            "sampled_share": 1.0}  # fmt: skip
