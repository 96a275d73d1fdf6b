"""All pairs of 64-bit hashes within k bits, as queries that DuckDB and Spark answer alike.

Cut into m > k bands, two hashes that differ in k bits are the same in at least m - k bands. So for each choice of m - k
bands, the hashes that are the same there are compared, and no pair is missed (Manku, Jain and Das Sarma 2007,
"Detecting Near-Duplicates for Web Crawling"). m is chosen by the number of hashes, so that few are compared in vain.

Pictures that are alike in a few frequencies, such as logos on white, share bands in their thousands. Of so many, all
are compared with the best GROUP_LIMIT only, which bounds the work; how many the others are is reported.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...utils.errors import OutputError
from ...utils.log import progress
from ...utils.machine.duckdb import connect, execute, load_duckdb, parquet_sql
from ...utils.machine.spark import escape_glob
from .hashes import NUM_CROPS

GROUP_LIMIT = 200  # hashes of equal bands that all others are compared with
MAX_BITS = 16  # of 64, beyond which strangers are alike
_HASH_BITS = 64
# Comparing two hashes costs so many times as much as putting one into a table.
_COMPARISON_COST = 4


@dataclass(frozen=True)
class Engine:
    """`run` answers a query; `xor` names the operator between two SQL terms; `relation` is the table of nodes."""

    run: Callable[[str], pa.Table]
    xor: Callable[[str, str], str]
    relation: str


def find_pairs(
    engine: Engine, num_nodes: int, bits: int, mirrored: bool, crops: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(better, worse, bits from each other) of near nodes, each pair once, int32, int32 and int8; and how many
    comparisons with groups were cut short.

    The engine's nodes: node, hash, mirrored and crops of each, the best having the lowest number. `mirrored`, `crops`:
    whether copies of that kind are looked for.
    """
    ones = _hashes_of(engine, ["hash"] + (["mirrored"] if mirrored else []))
    others = _hashes_of(engine, ["hash"] + ([f"crop_{crop}" for crop in range(NUM_CROPS)] if crops else []))
    found, cut = [], 0
    masks = list(choose_masks(bits, num_nodes))
    with progress(total=len(masks), desc="comparing", unit="table", delay=3) as bar:
        for mask in masks:
            key = f"(hash & CAST('{mask}' AS BIGINT))"
            groups = f"SELECT {key}, count(*) AS n FROM ({ones}) AS o GROUP BY 1 HAVING count(*) > {GROUP_LIMIT}"
            large = engine.run(f"SELECT coalesce(sum(n - {GROUP_LIMIT}), 0) AS n FROM ({groups}) AS g")["n"][0].as_py()
            cut += int(large)
            few = ones
            if large:
                place = f"row_number() OVER (PARTITION BY {key} ORDER BY node) AS n"
                ranked = f"SELECT node, hash, {place} FROM ({ones}) AS o"
                few = f"SELECT node, hash FROM ({ranked}) AS r WHERE n <= {GROUP_LIMIT}"
            apart = f"bit_count({engine.xor('a.hash', 'b.hash')})"
            table = engine.run(
                "SELECT least(a.node, b.node) AS better, greatest(a.node, b.node) AS worse, "
                f"CAST(min({apart}) AS TINYINT) AS bits FROM ({others}) AS a JOIN ({few}) AS b "
                f"ON {key.replace('hash', 'a.hash')} = {key.replace('hash', 'b.hash')} "
                f"WHERE a.node <> b.node AND {apart} <= {bits} GROUP BY 1, 2"
            )
            found.append([table[name].to_numpy() for name in ("better", "worse", "bits")])
            bar.update()
    return *_least(*map(np.concatenate, zip(*found, strict=True))), cut


def choose_masks(bits: int, num_hashes: int) -> Iterator[int]:
    """int64 masks, of which every two hashes within `bits` of each other agree under at least one."""

    def cost(num_bands: int) -> float:
        shared = 2.0 ** (_HASH_BITS * (num_bands - bits) / num_bands)
        return math.comb(num_bands, bits) * (1 + _COMPARISON_COST * num_hashes / shared)

    num_bands = min(range(bits + 1, bits + 9), key=cost)
    edges = [round(band * _HASH_BITS / num_bands) for band in range(num_bands + 1)]
    bands = [(1 << high) - (1 << low) for low, high in zip(edges, edges[1:], strict=False)]
    for chosen in combinations(bands, num_bands - bits):
        mask = sum(chosen)
        yield mask - (1 << _HASH_BITS) if mask >= 1 << (_HASH_BITS - 1) else mask


def _hashes_of(engine: Engine, columns: list[str]) -> str:
    """SQL: every node with each of these hashes of it."""
    return " UNION ALL ".join(f"SELECT node, {column} AS hash FROM {engine.relation}" for column in columns)


def _least(better: np.ndarray, worse: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each pair once, with its fewest bits."""
    order = np.lexsort((bits, worse, better))
    better, worse, bits = better[order], worse[order], bits[order]
    first = np.ones(len(better), bool)
    first[1:] = (better[1:] != better[:-1]) | (worse[1:] != worse[:-1])
    return better[first], worse[first], bits[first]


@contextmanager
def duckdb_engine(nodes: Path, memory_gb: float) -> Iterator[Engine]:
    """Over the parquet file `nodes`, beside which goes what does not fit into memory. Raises OutputError."""
    duckdb = load_duckdb()
    try:
        with connect(memory_gb, nodes.parent / "spill") as connection:
            execute(connection, f"CREATE TABLE nodes AS SELECT * FROM {parquet_sql([nodes])}")
            run = lambda query: execute(connection, query, lambda done: done.to_arrow_table())  # noqa: E731
            yield Engine(run, "xor({}, {})".format, "nodes")
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        problem = " ".join(str(error).split())[:300]
        raise OutputError(f"DuckDB ran out of room ({problem}); give more by --memory-gb, or make room") from error


def spark_engine(spark, nodes: Path) -> Engine:
    """Over the parquet file `nodes`, in a folder that all executors see."""
    spark.read.parquet(escape_glob(f"file://{nodes.absolute()}")).createOrReplaceTempView("nodes")
    return Engine(lambda query: spark.sql(query).toArrow(), "({} ^ {})".format, "nodes")
