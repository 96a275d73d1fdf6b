"""Sizes are those of the picture and of the crop that the sample shows. That they are the same for cached latents, for
any loader processes and ranks is in the tests of those, whose batches hold them."""

from dataclasses import replace

import numpy as np
import pytest
from formats import write_mds
from PIL import Image

from ppldm.data.cached.run import LatentsRule
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import decode_pixels, scale_to_cover
from ppldm.data.inputs import Sizes
from ppldm.data.select.selection import select_rows
from ppldm.data.shapes import ShapeRule
from ppldm.utils.errors import ConfigError
from ppldm.utils.rng import Generators

SHAPES = ((16, 16), (16, 32), (24, 16))  # height, width
PICTURES = [(20, 18), (40, 20), (20, 34), (34, 17), (90, 61), (16, 16)]  # width, height
KEYS = [(epoch, place) for epoch in range(3) for place in range(6)]
CROPS = [
    {"random": False},
    {"num_crops": 3},
    {"num_crops": 2, "flip": True},
    {},
    {"fraction": 1.0, "flip": True},
    {"random": False, "smart": True},
]


@pytest.mark.parametrize("as_seen", [False, True])
@pytest.mark.parametrize("shapes", [None, SHAPES])
@pytest.mark.parametrize("crops", CROPS)
def test_a_sample_shows_what_its_sizes_say(tmp_path, make_image, make_dataset, shapes, crops, as_seen):
    """Against the whole picture, resized by Pillow and cropped there; `as_seen` mirrored before it is cropped, as
    diffusers' train_text_to_image_sdxl.py does."""
    write_part(tmp_path / "a.gz", [Row(f"picture {n}", make_image(n, size), {}) for n, size in enumerate(PICTURES)])
    write_filelist(tmp_path / "a.filelist", ["a.gz"])
    sources = read_sources(tmp_path / "a.filelist")
    selection = select_rows(sources, shapes=ShapeRule(shapes) if shapes else None)
    dataset, mirrored = make_dataset(sources, selection=selection, crops=crops), set()
    dataset.inputs["sizes"] = dataset._sizes = Sizes(as_seen=as_seen)
    for key in KEYS:
        sample = dataset[key]
        height, width, top, left, *shape = sample["sizes"].tolist()
        row = int(sample["row_ids"])
        assert (width, height) == PICTURES[row] and tuple(shape) == sample["pixel_values"].shape[1:]
        scaled = scale_to_cover(height, width, *shape, dataset.crops.fraction)
        whole = Image.fromarray(decode_pixels(dataset.read_row(row).image)).resize(scaled, Image.Resampling.LANCZOS)
        plain, mirror = np.asarray(whole), np.asarray(whole)[:, ::-1]
        cut = slice(top, top + shape[0]), slice(left, left + shape[1])
        shown = plain[cut], mirror[cut] if as_seen else plain[cut][:, ::-1]
        same = [np.array_equal(one.transpose(2, 0, 1), sample["pixel_values"]) for one in shown]
        assert any(same)
        mirrored.add(same[0])
    assert len(mirrored) == 1 + dataset.crops.flip


def test_dropped_ones_are_zeros_by_seed_epoch_and_row_and_nothing_else_changes(make_dataset):
    made, keys = {}, [(epoch, place) for epoch in range(40) for place in range(24)]
    for drop in (0.0, 0.3, 0.6):
        dataset = make_dataset()
        dataset.inputs["sizes"] = Sizes(drop)
        made[drop] = dataset.make_batch(keys)
    none, some, more = (batch["sizes"] for batch in made.values())
    zero = [~(sizes != 0).any(axis=1) for sizes in (none, some, more)]
    assert not zero[0].any() and (zero[1] <= zero[2]).all()
    assert [flags.mean() for flags in zero[1:]] == pytest.approx([0.3, 0.6], abs=0.05)
    assert all(np.array_equal(sizes[~flags], none[~flags]) for sizes, flags in zip((some, more), zero[1:], strict=True))
    assert all(np.array_equal(made[0.0][name], made[0.3][name]) for name in made[0.0].keys() - {"sizes"})
    again = Sizes(0.3).forget(none[500:].copy(), keys[500:], Generators(7))  # whatever came before
    assert np.array_equal(again, some[500:])


def test_a_row_in_the_place_of_a_bad_one_has_its_own(tmp_path, make_image, make_dataset):
    sizes = {0: (40, 20), 1: (20, 34)}
    rows = [Row("picture", b"no image" if row == 0 else make_image(row, size), {"width": size[0], "height": size[1]})
            for row, size in sizes.items()]  # fmt: skip
    write_part(tmp_path / "a.gz", rows)
    write_filelist(tmp_path / "a.filelist", ["a.gz"])
    dataset = make_dataset(read_sources(tmp_path / "a.filelist"))
    dataset.inputs["sizes"] = Sizes()
    sample = dataset[(0, 0)]
    assert sample["row_ids"] == 1 and sample["skipped"] == ["image"] and sample["sizes"][:2].tolist() == [34, 20]


def test_of_latents_without_a_known_size_they_are_zeros(tmp_path, make_dataset):
    columns = {
        "caption": ("str", None, lambda row: b"picture"),
        "caption_latents": ("bytes", None, lambda row: b"\0" * 64),
        "latents_16": ("bytes", None, lambda row: np.ones((4, 2, 2), "<f2").tobytes()),
    }
    write_mds(tmp_path / "shard.00000.mds", range(4), columns)
    write_filelist(tmp_path / "m.filelist", ["shard.00000.mds"])
    write_filelist(tmp_path / "m.list", ["m.filelist format=mds latents=cached"])
    settings = {"inputs": {"cached": True}, "latents": LatentsRule("a" * 32, 0.5), "crops": {"random": False}}
    dataset = make_dataset(read_sources(tmp_path / "m.list"), **settings)
    batch = dataset.make_batch([(0, place) for place in range(4)])
    assert batch["sizes"].shape == (4, 6) and not batch["sizes"].any() and batch["moments"].any()


def test_a_smart_crop_of_latents_is_refused(make_sources, make_dataset):
    sources = [replace(one, latents="ondemand") for one in make_sources([3])]
    with pytest.raises(ConfigError, match="where a smart crop lies; omit --size_conditioning"):
        make_dataset(sources, inputs={"cached": True}, latents=LatentsRule("a" * 32, 0.5),
                     crops={"random": False, "smart": True})  # fmt: skip
