"""A data set gives the same samples whether its rows are pictures, cached latents, or some of each."""

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ppldm.data.cached.file import Latents, cached_path, create_latents
from ppldm.data.cached.key import LatentsKey
from ppldm.data.cached.run import LatentsRule
from ppldm.data.filelist import read_sources
from ppldm.data.formats.open import open_part, summarize
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.data.select.expression import parse_where
from ppldm.data.select.selection import select_rows
from ppldm.utils.errors import ConfigError, OutputError, PartError
from ppldm.utils.rng import make_rng

RULE = LatentsRule("a" * 32, 0.5, "float32")
CROPS = {"random": False}


def moments_of(row: int, variant: int = 0) -> np.ndarray:
    """What stands for the latents of the row of caption "picture <row> 图"."""
    return np.random.default_rng([row, variant]).standard_normal((2, 4, 2, 2)).astype(np.float32)


def write_latents(source, crops=None, rows=None, folder=None, engine="eager"):
    """Latents of all rows of a source, or of some, of the pictures' numbers."""
    rule = CropRule(**{**CROPS, **(crops or {})})
    for path in source.parts:
        part = open_part(path, source)
        key = LatentsKey.of(RULE.autoencoder, [(16, 16)], rule, "float32").of_part(source, part.identity[:2])
        target = cached_path(path, key, folder)
        create_latents(target, key, {"channels": 4, "factor": 8, "engine": engine}, part)
        latents = Latents(target, key, writable=True)
        for row in range(len(part)):
            picture = int(part.read(row).caption.split()[1])
            for variant in range(rule.num_variants) if rows is None or picture in rows else ():
                latents.write(row, variant, moments_of(picture, variant))


@pytest.fixture
def make_cached(make_dataset):
    def make(sources, mode="cached", crops=None, **changes):
        sources = [replace(source, latents=source.latents if mode is None else mode) for source in sources]
        changes = {"latents": RULE, "inputs": {"cached": True}, **changes}
        return make_dataset(sources, crops={**CROPS, **(crops or {})}, **changes)

    return make


def keys(dataset, epochs=2):
    return [(epoch, place) for epoch in range(epochs) for place in range(len(dataset))]


def test_all_but_the_picture_is_as_without_latents(make_sources, make_dataset, make_cached):
    sources = make_sources([5, 9], [10])
    online = make_dataset(sources, crops=CROPS)
    for source in sources:
        write_latents(source)
    cached = make_cached(sources)
    expected, found = (one.make_batch(keys(one)) for one in (online, cached))
    assert found.keys() == expected.keys() - {"pixel_values"} | {"moments"}
    for name in expected.keys() - {"pixel_values", "checksums"}:
        assert np.array_equal(found[name], expected[name])
    assert all(
        np.array_equal(one, moments_of(row)) for one, row in zip(found["moments"], found["row_ids"], strict=True)
    )


@pytest.mark.parametrize("present", [(), tuple(range(0, 24, 2)), tuple(range(24))])
def test_control_images_are_those_of_the_pictures(make_sources, make_dataset, make_cached, present):
    sources = make_sources([5, 9], [10])
    crops = {"random": True, "num_crops": 2, "flip": True}
    online = make_dataset(sources, crops=crops, inputs={"control": "inpainting"})
    for source in sources:
        write_latents(source, crops, rows=present)
    cached = make_cached(sources, "ondemand", crops, inputs={"cached": True, "control": "inpainting"})
    expected, found = (one.make_batch(keys(one)) for one in (online, cached))
    assert np.array_equal(found["control"], expected["control"])
    places = [place for place, row in enumerate(found["row_ids"]) if row not in present]
    assert ("uncached" in found) == bool(places)
    if places:
        assert np.array_equal(found["pixel_values"][places], expected["pixel_values"][places])
        assert not np.delete(found["pixel_values"], places, axis=0).any()


@pytest.mark.parametrize("present", [(), (3,), tuple(range(0, 24, 2)), tuple(range(23))])
def test_rows_without_latents_come_as_pictures(make_sources, make_dataset, make_cached, present):
    sources = make_sources([5, 9], [10])
    expected = make_dataset(sources, crops=CROPS)
    expected = expected.make_batch(keys(expected))
    for source in sources:
        write_latents(source, rows=present)
    dataset = make_cached(sources, "ondemand")
    batch = dataset.make_batch(keys(dataset))
    places = [place for place, row in enumerate(batch["row_ids"]) if row not in present]
    assert batch["uncached"][:, 0].tolist() == places
    if places:
        assert np.array_equal(batch["pixel_values"][places], expected["pixel_values"][places])
        assert not np.delete(batch["pixel_values"], places, axis=0).any()
    for place, row in enumerate(batch["row_ids"]):
        assert np.array_equal(batch["moments"][place], moments_of(row) if row in present else np.zeros((2, 4, 2, 2)))
    starts = dataset.selection.starts
    for place, part, row, variant in batch["uncached"]:
        assert starts[part] + row == batch["row_ids"][place] and variant == 0
    # What is kept of them is what comes next.
    computed = np.stack([moments_of(row) for row in batch["row_ids"][places]])
    assert np.array_equal(dataset.latents.keep(batch["uncached"][:, 1:], computed), computed)
    again = make_cached(sources).make_batch(keys(dataset))
    assert "uncached" not in again and np.array_equal(again["moments"][places], computed)


def test_pixels_without_those_of_cached_rows(make_sources, make_dataset, make_cached):
    sources = make_sources([5], [4])
    write_latents(sources[1])
    dataset = make_cached([sources[0], replace(sources[1], latents="cached")], None)
    expected, batch = make_dataset(sources, crops=CROPS), [(0, place) for place in (6, 3, 7, 0, 8)]
    found = dataset.make_batch(batch)
    assert found["uncached"][:, 0].tolist() == [1, 3] and found["row_ids"].tolist() == [6, 3, 7, 0, 8]
    assert np.array_equal(found["pixel_values"], expected.make_batch(batch)["pixel_values"][[1, 3]])


def test_what_is_damaged_is_computed_again_on_demand_and_else_named(make_sources, make_cached, tmp_path):
    sources = make_sources([4])
    write_latents(sources[0])
    (path,) = tmp_path.glob("*.latents")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # of row 3
    path.write_bytes(data)
    with pytest.raises(PartError, match="row 3 is damaged.*ppldm precompute"):
        make_cached(sources).make_batch([(0, 3)])
    dataset = make_cached(sources, "ondemand")
    batch = dataset.make_batch([(0, 3), (0, 1)])
    assert batch["uncached"].tolist() == [[0, 0, 3, 0]]
    dataset.latents.keep(batch["uncached"][:, 1:], moments_of(3)[None])
    assert np.array_equal(make_cached(sources).make_batch([(0, 3)])["moments"][0], moments_of(3))


def test_rows_are_not_added_to_those_of_an_engine(make_sources, make_cached):
    sources = make_sources([4])
    write_latents(sources[0], rows=(0, 1, 2), engine="openvino")
    dataset = make_cached(sources, "ondemand")
    batch = dataset.make_batch(keys(dataset, 1))
    assert len(batch["uncached"]) == 1
    with pytest.raises(ConfigError, match="computed with --engine openvino; complete it with"):
        dataset.latents.keep(batch["uncached"][:, 1:], moments_of(3)[None])


def test_what_is_kept_first_stays(make_sources, make_cached):
    sources = make_sources([4])
    dataset = make_cached(sources, "ondemand")
    batch = dataset.make_batch(keys(dataset, 1))
    first = dataset.latents.keep(batch["uncached"][:, 1:], np.stack([moments_of(row) for row in range(4)]))
    assert np.array_equal(dataset.latents.keep(batch["uncached"][:, 1:], first + 1), first)


def test_moments_that_are_not_finite_are_a_bad_row_from_then_on(make_sources, make_cached):
    dataset = make_cached(make_sources([4]), "ondemand")
    batch = dataset.make_batch(keys(dataset, 1))
    moments = np.stack([moments_of(row) for row in batch["row_ids"]])
    moments[batch["row_ids"] == 2, 1] = np.nan
    kept = dataset.latents.keep(batch["uncached"][:, 1:], moments)
    assert np.array_equal(kept, moments, equal_nan=True)
    again = dataset.make_batch([(1, 2)])
    assert again["skipped"] == ["not_finite"] and again["row_ids"][0] != 2


@pytest.mark.parametrize("crops", [{"random": True, "num_crops": 3}, {"flip": True}])
def test_variants_are_those_that_are_drawn(make_sources, make_cached, make_dataset, crops):
    sources = make_sources([6])
    write_latents(sources[0], crops)
    dataset = make_cached(sources, crops=crops)
    batch, drawn = dataset.make_batch(keys(dataset, 4)), set()
    for (epoch, _), row, moments in zip(keys(dataset, 4), batch["row_ids"], batch["moments"], strict=True):
        variant = dataset.crops.variant(dataset.crops.draw(partial(make_rng, dataset.seed, epoch=epoch, row=row)))
        assert np.array_equal(moments, moments_of(row, variant))
        drawn.add(variant)
    assert drawn == set(range(dataset.crops.num_variants))
    online = make_dataset(sources, crops={**CROPS, **crops})
    assert np.array_equal(batch["sizes"], online.make_batch(keys(dataset, 4))["sizes"])


def test_parts_need_not_be_there(make_sources, make_cached, tmp_path):
    sources = [replace(source, latents="cached") for source in make_sources([5, 9], [10])]
    for source in sources:
        write_latents(source)
    where = parse_where('width>=21 and caption!="picture 4 图"')
    before = make_cached(sources, selection=select_rows(sources, where))
    expected, summary = before.make_batch(keys(before)), summarize(sources[0].parts[0], sources[0])
    for path in (*tmp_path.glob("*.gz"), *tmp_path.glob("*.idx"), *tmp_path.glob("*.columns")):
        path.unlink()
    found = summarize(sources[0].parts[0], sources[0])
    assert found == summary and found.content == summary.content
    sources = read_sources(tmp_path / "train.filelist.list", latents="cached")
    after = make_cached(sources, selection=select_rows(sources, where))
    assert after.fingerprint.digest == before.fingerprint.digest
    batch = after.make_batch(keys(after))
    assert batch.keys() == expected.keys() and all(np.array_equal(batch[name], expected[name]) for name in batch)
    assert after.read_row(3).caption == "picture 3 图" and after.read_row(3).image == b""
    with pytest.raises(PartError, match="not here.*no cached latents"):
        open_part(tmp_path / "list0-part-00009.gz", sources[0])
    for mode in ("off", "ondemand"):  # which need the pictures
        with pytest.raises(PartError, match="list0-part-00000.gz"):
            open_part(sources[0].parts[0], replace(sources[0], latents=mode))


def test_a_bad_picture_is_bad_whether_or_not_it_is_cached(make_sources, make_cached, make_image, tmp_path):
    """By the same reason; a row kept on demand too, so that the file is whole after an epoch."""
    sources = make_sources([6])
    rows = [Row(f"picture {i} 图", b"no image" if i == 2 else make_image(i), {}) for i in range(6)]
    write_part(sources[0].parts[0], rows)
    dataset = make_cached(sources, "ondemand")
    first = dataset.make_batch(keys(dataset, 1))
    dataset.latents.keep(first["uncached"][:, 1:], np.stack([moments_of(row) for row in first["row_ids"]]))
    again = make_cached(sources).make_batch(keys(dataset, 1))
    assert first["skipped"] == again["skipped"] == ["image"]
    assert np.array_equal(first["row_ids"], again["row_ids"])


def test_a_data_set_of_latents_goes_to_another_process(make_sources, make_cached):
    sources = make_sources([5])
    write_latents(sources[0])
    dataset = make_cached(sources)
    expected = dataset.make_batch(keys(dataset))
    found = pickle.loads(pickle.dumps(dataset)).make_batch(keys(dataset))
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_what_cannot_be_is_refused(make_sources, make_cached, make_dataset, tmp_path):
    sources = make_sources([5])
    write_latents(sources[0])
    with pytest.raises(ConfigError, match="known ahead"):
        make_cached(sources, crops={"random": True})
    with pytest.raises(ConfigError, match="frozen autoencoder"):
        make_dataset([replace(sources[0], latents="cached")], crops=CROPS)
    with pytest.raises(PartError, match="autoencoder"):
        make_cached(sources, latents=replace(RULE, autoencoder="b" * 32))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        dataset = make_cached([replace(sources[0], latents_dir=tmp_path / "file" / "below")], "ondemand")
        dataset.make_batch(keys(dataset))


def test_latents_of_a_part_elsewhere_and_of_many_parts_of_one_name(make_sources, make_cached, tmp_path):
    sources = [replace(source, latents_dir=tmp_path / "kept") for source in make_sources([5])]
    (tmp_path / "kept").mkdir()
    write_latents(sources[0], folder=tmp_path / "kept")
    dataset = make_cached(sources)
    assert dataset.make_batch([(0, 3)])["moments"].shape == (1, 2, 4, 2, 2)


def test_a_row_of_pictures_only_is_not_kept(make_sources, make_cached, tmp_path):
    sources = make_sources([5], [4])
    write_latents(sources[0])
    sources = [replace(sources[0], latents="cached"), sources[1]]
    dataset = make_cached(sources, None)
    batch = dataset.make_batch(keys(dataset, 1))
    assert batch["uncached"][:, 0].tolist() == [5, 6, 7, 8]
    computed = np.ones((4, 2, 4, 2, 2), np.float32) / 3
    assert np.array_equal(dataset.latents.keep(batch["uncached"][:, 1:], computed), computed)
    assert len(list(tmp_path.glob("*.latents"))) == 1
