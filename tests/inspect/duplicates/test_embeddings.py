"""Laws: the stars are those of going through the pictures one by one, whatever the blocks; embeddings are of these very
rows; the same command goes on."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import draw, encode

from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.inspect.duplicates import stars as embeddings
from ppldm.inspect.duplicates.stars import find_stars
from ppldm.utils.errors import ConfigError, DataError


def one_by_one(vectors: np.ndarray, least: float) -> tuple[list, list]:
    """By the words of `find_stars`."""
    stars, far, kept = [], [], []
    for node, vector in enumerate(vectors.astype(np.float32)):
        found = [(float(vector @ vectors[other].astype(np.float32)), -other) for other in kept]
        similarity, other = max(found, default=(-1.0, 0))
        if similarity >= least:
            stars.append(-other)
            far.append(round(100 * (1 - similarity)))
        else:
            stars.append(node)
            far.append(0)
            kept.append(node)
    return stars, far


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 40), st.sampled_from([0.3, 0.7, 0.95]), st.sampled_from([1, 3, 7, 64]))
def test_stars_are_those_of_going_through_the_pictures_one_by_one(seed, count, least, block):
    rng = np.random.default_rng(seed)
    # Of a few directions with noise, so that there are copies; some rows have none.
    vectors = rng.normal(size=(5, 6))[rng.integers(0, 5, count)] + 0.3 * rng.normal(size=(count, 6))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[rng.random(count) < 0.1] = 0
    vectors = vectors.astype(np.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "_BLOCK", block)
        patch.setattr(embeddings, "_KEPT_AT_ONCE", 2 * block)
        star, distance = find_stars(vectors, least)
    stars, far = one_by_one(vectors, least)
    assert star.tolist() == stars and np.abs(distance - far).max(initial=0) <= 1
    assert not distance[star == np.arange(count)].any()


@pytest.fixture
def listed(here):
    one, two = draw(1), draw(2)
    rows = [one, two, one.resize((50, 40)), two.rotate(180), two.resize((70, 50))]
    written = [Row(f"picture {n}", encode(picture), {"key": str(n)}) for n, picture in enumerate(rows)]
    write_part("a.gz", [written[0], Row("torn", written[0].image[:90], {"key": "torn"}), written[1]])
    write_part("b.gz", written[2:])
    (here / "all.filelist").write_text("a.gz\nb.gz\n")
    return here


def test_copies_by_a_network_are_labelled(listed, run):
    told = json.loads(run("embed", "all.filelist", "--network", "pixels", "--out", "vectors", "--json"))
    assert [part["rows"] for part in told["parts"]] == [3, 3] and sum(told["parts"][0]["skipped"].values()) == 1
    vectors = np.concatenate([np.load(f"vectors/{part['file']}") for part in told["parts"]])
    lengths = np.linalg.norm(vectors.astype(float), axis=1)
    np.testing.assert_allclose(lengths, [1, 0, 1, 1, 1, 1], atol=2e-3)
    flags = "--embeddings", "vectors", "--least-similarity", "0.999", "--workers", "1"
    report = json.loads(run("dedup", "all.filelist", "--out", "out", *flags, "--json"))
    dropped = [json.loads(line)["key"] for line in (listed / "out/duplicates.jsonl").read_text().splitlines()]
    assert dropped == ["2", "4"] and report["kept"] == 3 and "chains" not in report
    assert report["rows"] == report["kept"] + report["duplicates"] + sum(report["skipped"].values()) == 6
    assert (listed / "out/sheet.png").exists() and "2 copies of them" in run(
        "dedup", "all.filelist", "--out", "out", *flags
    )
    # What has not changed is not computed again, and what has is refused until it is.
    before = (listed / "vectors/00000.npy").stat().st_mtime_ns
    write_part("b.gz", [Row("other", encode(draw(3)), {"key": "5"})])
    with pytest.raises(DataError, match="are not of b.gz as it is now"):
        run("dedup", "all.filelist", "--out", "out", *flags)
    run("embed", "all.filelist", "--network", "pixels", "--out", "vectors")
    assert (listed / "vectors/00000.npy").stat().st_mtime_ns == before
    assert json.loads(run("dedup", "all.filelist", "--out", "out", *flags, "--json"))["duplicates"] == 0


def test_flags_that_say_nothing_together(listed, run):
    for flags in (["--exact"], ["--bits", "4"], ["--least-similarity", "1.5"]):
        with pytest.raises(ConfigError):
            run("dedup", "all.filelist", "--out", "out", "--embeddings", "vectors", *flags)
    with pytest.raises(ConfigError, match="no embeddings.json"):
        run("dedup", "all.filelist", "--out", "out", "--embeddings", "vectors")
    with pytest.raises(ConfigError, match="no feature network"):
        run("embed", "all.filelist", "--network", "pixel:x", "--out", "vectors")
