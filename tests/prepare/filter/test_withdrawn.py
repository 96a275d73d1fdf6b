"""LAION's withdrawn lists are known by their paths or columns, and their published filters count as they say."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppldm.prepare.datasets.entry import find_entry
from ppldm.prepare.filter.filter import filter, find_withdrawn

LAION = ["URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "punsafe", "pwatermark", "AESTHETIC_SCORE", "hash"]


@pytest.mark.parametrize(
    "path, columns, is_withdrawn",
    [
        ("/data/laion-art.parquet", ["url"], True),
        ("laion_2b_en_ae4.5/2B-en-4.5_1.parquet", ["url"], True),
        ("meta/a.parquet", LAION, True),
        ("meta/a.parquet", LAION[:-1], False),
        ("meta/a.parquet", [name.lower() for name in LAION], False),
        ("relaion2B-en-research-safe/part-0.parquet", LAION, False),
        ("coyo/part-0.parquet", ["url", "text", "width", "height"], False),
    ],
)
def test_by_path_or_columns(path, columns, is_withdrawn):
    warning = find_withdrawn([path], columns)
    assert (warning is not None) == is_withdrawn
    assert not is_withdrawn or (path in warning and "relaion-5b-research-safe" in warning)


@pytest.mark.parametrize("name, score", [("laion-art", "aesthetic"), ("laion2b-en-aesthetic", "AESTHETIC_SCORE")])
def test_the_filter_of_an_entry_counts_as_its_published_conditions(tmp_path, caplog, name, score):
    """On columns as published, with values at and around each bound."""
    rng, count = np.random.default_rng(0), 400
    width, height = rng.integers(510, 515, (2, count))
    unsafe, aesthetic = rng.choice([0.97, 0.98, 0.99], count), rng.choice([4.4, 4.5, 8.1], count)
    language = rng.choice(["en", "de"], count)
    columns = {"URL": [f"http://a/{i}" for i in range(count)], "TEXT": ["a"] * count, "WIDTH": width, "HEIGHT": height}
    columns |= {"punsafe": unsafe, "pwatermark": [0.1] * count, "similarity": [0.3] * count, score: aesthetic}
    columns |= {"hash": range(count)} | ({"LANGUAGE": language} if name == "laion-art" else {})
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    entry = find_entry(name)
    wanted = (width >= 512) & (height >= 512)
    wanted &= language == "en" if name == "laion-art" else (unsafe <= 0.98) & (aesthetic >= 4.5)
    filter([str(tmp_path / "a.parquet")], output=str(tmp_path / "out"), **entry.pipeline["filter"])
    assert sum(pq.read_table(path).num_rows for path in (tmp_path / "out").glob("*.parquet")) == wanted.sum()
    assert entry.rows > entry.filtered_rows and "looks like metadata of LAION-5B" in caplog.text
