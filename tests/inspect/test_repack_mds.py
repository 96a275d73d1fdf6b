"""Law: `ppldm repack --format mds` writes the rows as shards that say what they are, for any reader of the format."""

import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from small_weights import write_clip

from ppldm.data.cached.file import CachedFile
from ppldm.data.cached.key import EmbeddingsKey, LatentsKey
from ppldm.data.filelist import read_sources
from ppldm.data.formats import mds
from ppldm.data.formats.open import open_part
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.utils.errors import ConfigError, DataError

DECODE = {"str": bytes.decode, "jpeg": bytes, "bytes": bytes, "json": json.loads}
DECODE["int32"] = lambda data: struct.unpack("<i", data)[0]


def decode_by_hand(folder: Path) -> list[dict]:
    """The samples of all shards that `index.json` names, from the description of the format and not by our reader."""
    samples = []
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        if shard["zip_data"]:
            packed = (folder / shard["zip_data"]["basename"]).read_bytes()
            assert len(packed) == shard["zip_data"]["bytes"] and shard["compression"] == "zstd"
            data = pa.Codec("zstd").decompress(packed, shard["raw_data"]["bytes"]).to_pybytes()
        else:
            data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"] and shard["column_names"] == sorted(shard["column_names"])
        (count,) = struct.unpack_from("<I", data)
        starts = struct.unpack_from(f"<{count + 1}I", data, 4)
        stated = json.loads(data[8 + 4 * count : starts[0]])
        assert count == shard["samples"] and starts[-1] == len(data) and stated.items() <= shard.items()
        for start in starts[:-1]:
            sizes = struct.unpack_from(f"<{stated['column_sizes'].count(None)}I", data, start)
            place, sample, given = start + 4 * len(sizes), {}, iter(sizes)
            columns = zip(*(stated[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)
            for name, encoding, fixed in columns:
                size = next(given) if fixed is None else fixed
                sample[name] = DECODE[encoding](data[place : place + size])
                place += size
            samples.append(sample)
    return samples


def read_list(path: str) -> list[list[Row]]:
    """The rows of each list."""
    found = []
    for source in read_sources(path):
        parts = [open_part(part, source) for part in source.parts]
        found.append([part.read(number) for part in parts for number in range(len(part))])
    return found


@pytest.mark.parametrize("form", ["mds", "mds.zstd"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_shards_hold_the_rows_of_the_parts(data, run, monkeypatch, form, workers):
    if workers == 1:
        monkeypatch.setattr(mds, "SHARD_BYTES", 1000)  # several shards for each part
    run("repack", "all.list", "--out", "parts")
    manifest = json.loads(
        run("repack", "all.list", "--out", "new", "--format", form, "--num-workers", workers, "--json")
    )
    assert (manifest["rows_in"], manifest["rows_out"], manifest["skipped"]) == (30, 29, {"empty_caption": 1})
    assert read_list("new/repacked.filelist.list") == read_list("parts/repacked.filelist.list")
    assert [source.weight for source in read_sources("new/repacked.filelist.list")] == [1, 3]
    shards = json.loads((data / "new/parts/index.json").read_text())["shards"]
    encodings = [dict(zip(one["column_names"], one["column_encodings"], strict=True)) for one in shards]
    assert (
        {"int32"} <= {one["width"] for one in encodings} <= {"int32", "json"}
    )  # of what cannot be read, none is known
    rows = [row for rows in read_list("parts/repacked.filelist.list") for row in rows]
    known = [{"caption": row.caption, "jpg": row.image, **row.meta} for row in rows]
    found = decode_by_hand(data / "new/parts")  # two pictures cannot be read: their shard has a null for their sides
    assert [{name: value for name, value in one.items() if value is not None} for one in found] == known
    assert (len([*data.glob("new/parts/*/shard*[!x]")]) > 3) == (workers == 1)


@pytest.mark.slow
@pytest.mark.needs("streaming")
@pytest.mark.parametrize("words", [["mds"], ["mds.zstd"], ["mds", "--latents"]])
def test_mosaicmls_own_library_reads_each_row(tiny, here, run, words):
    shutil.copytree(tiny.folder, here / "data", ignore=shutil.ignore_patterns("*.latents", "*.embeddings"))
    lists = here / "data" / Path(tiny.file_list).name
    if words[1:]:
        words = [*words, tiny.vae]
        run("precompute", lists, "--vae", tiny.vae, "--resolutions", "16", "32")
    run("repack", lists, "--out", "new", "--format", *words)
    script = Path(__file__).parents[1] / "helpers/streamed.py"
    done = subprocess.run([sys.executable, script, here / "new/parts"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    known = [{name: plain(name, value) for name, value in row.items()} for row in decode_by_hand(here / "new/parts")]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == known and len(found) > 10
    assert all({"latents_16", "latents_32"} <= row.keys() for row in found) if words[1:] else "jpg" in found[0]
    assert all(type(row[side]) is int for row in found for side in ("width", "height"))


def plain(name: str, value):
    """As helpers/streamed.py prints it."""
    if name == "jpg":
        value = np.asarray(Image.open(io.BytesIO(value)).convert("RGB")).tobytes()
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else value


def test_metadata_and_second_images_of_any_kind_stay(here, run):
    metas = [{"a": 1, "n": 2.5, "text": "not the caption"}, {"b": ["x", None], "a": "1", "图": "画"}, {"n": False}]
    images = []
    for side in (7, 8, 9):
        buffer = io.BytesIO()
        Image.new("RGB", (side, 5)).save(buffer, "WEBP")
        images.append(buffer.getvalue())
    rows = [Row(f"c {n}", images[n], {**metas[n], "width": 7 + n, "height": 5}, (), images[-n]) for n in range(3)]
    write_part("a.gz", rows)
    (here / "a.filelist").write_text("a.gz\n")
    (here / "a.list").write_text("a.filelist layout=control\n")
    run("repack", "a.list", "--out", "new", "--format", "mds")
    assert read_list("new/repacked.filelist.list") == [rows]


def test_it_goes_on_follows_its_source_and_keeps_to_its_format(data, run, monkeypatch):
    monkeypatch.setattr(mds, "SHARD_BYTES", 1000)
    words = ("repack", "all.list", "--out", "new", "--format", "mds")
    run(*words)
    index, first = data / "new/parts/index.json", data / "new/parts/00000/shard.00000.mds"
    before, written = decode_by_hand(index.parent), first.stat().st_mtime_ns
    (data / "new/parts/00001/shard.00001.mds").write_bytes(b"x")
    run(*words)
    assert decode_by_hand(index.parent) == before and first.stat().st_mtime_ns == written
    (data / "all.list").write_text("parts.filelist 1\n")
    run(*words, "--redo")
    assert len(decode_by_hand(index.parent)) == 22 and not (data / "new/parts/00002").exists()
    with pytest.raises(ConfigError, match="written as"):
        run("repack", "all.list", "--out", "new")
    with pytest.raises(ConfigError, match="written as"):
        run(*words[:-1], "mds.zstd")
    run("repack", "all.list", "--out", "new", "--redo")
    assert not index.exists() and sorted(path.name for path in index.parent.glob("*[!x]")) == [
        "part-00000.gz", "part-00000.gz.columns", "part-00001.gz", "part-00001.gz.columns",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="name --out DIR"):
        run("repack", "all.list", "--in-place", "--format", "mds")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cached_latents_and_embeddings_are_micro_diffusions_columns(tiny, here, run, dtype):
    """A sample of the posterior, scaled, and a caption's hidden states: the cache's numbers, which training reads."""
    cached_by_others = shutil.ignore_patterns("*.latents", "*.embeddings")
    shutil.copytree(tiny.folder, here / "data", ignore=cached_by_others)
    lists = here / "data" / Path(tiny.file_list).name
    for what in (["--vae", tiny.vae, "--resolutions", "16", "32"], ["--text-encoder", write_clip(here / "clip")]):
        run("precompute", lists, *what, "--dtype", dtype, "--text-dtype", dtype)
    words = ("repack", lists, "--out", "new", "--format", "mds")
    run(*words, "--latents", tiny.vae)
    found = decode_by_hand(here / "new/parts")
    sources, number = [(part, source) for source in read_sources(str(lists)) for part in source.parts], 0
    noises, scaling = [], json.loads(Path(tiny.vae, "config.json").read_text())["scaling_factor"]
    for path, source in sources:
        part = open_part(path, source)
        names = (f"{path.name}.*{key.suffix}" for key in (LatentsKey, EmbeddingsKey))
        caches = [CachedFile(one) for name in names for one in path.parent.glob(name)]
        moments = {one.key.shapes[0][0]: one for one in caches if isinstance(one.key, LatentsKey)}
        (texts,) = (one for one in caches if isinstance(one.key, EmbeddingsKey))
        for row in range(len(part)):
            sample, number = found[number], number + 1
            assert sample["caption"] == part.read(row).caption and not sample.keys() & {"jpg", "control_image"}
            assert sample["caption_latents"] == texts.read(row, 0).astype("<f2").tobytes()
            for side, cached in moments.items():
                mean, std = cached.read(row, 0)
                latents = np.frombuffer(sample[f"latents_{side}"], "<f2").reshape(mean.shape) / np.float32(scaling)
                noises += ((latents - mean) / std).ravel().tolist()
    assert number == len(found) > 10 and moments.keys() == {16, 32}
    assert len({round(one, 2) for one in noises}) > 200 and np.abs(noises).max() < 6
    assert np.mean(noises) == pytest.approx(0, abs=0.1) and np.std(noises) == pytest.approx(1, abs=0.05)
    (source, *_), shape = read_sources("new/repacked.filelist.list"), moments[32].read(0, 0)[0].shape
    read = open_part(source.parts[0], source).read_latents(0, 32, shape)
    assert (read == np.frombuffer(found[0]["latents_32"], "<f2").reshape(shape)).all()
    before = (here / "new/parts/index.json").read_bytes()
    run(*words, "--latents", tiny.vae)
    assert (here / "new/parts/index.json").read_bytes() == before
    with pytest.raises(ConfigError, match="part files have latents beside them"):
        run("repack", lists, "--out", "other", "--latents", tiny.vae)
    run("precompute", lists, "--vae", tiny.vae, "--resolutions", "32", "--flips", "--dtype", dtype)
    with pytest.raises(DataError, match="has cached latents or embeddings of several kinds"):
        run("repack", lists, "--out", "other", "--format", "mds", "--latents", tiny.vae)
    for name in ("*.latents", "*.embeddings"):
        for cached in (here / "data").glob(name):
            cached.unlink()
    with pytest.raises(DataError, match="has no cached latents of squares"):
        run("repack", lists, "--out", "other", "--format", "mds", "--latents", tiny.vae)
