"""Pictures far larger than they are trained at are named, with the command that makes them smaller once; others not."""

from dataclasses import replace

import pytest
from PIL import Image

from ppldm.config.data import DataOptions
from ppldm.config.recipe import Recipe
from ppldm.data.filelist import read_sources
from ppldm.training.doctor.run import look_at_sizes
from ppldm.training.rows import describe_large


@pytest.fixture
def sources(tmp_path):
    """Two pictures of 3 million pixels."""
    for name in "ab":
        Image.new("1", (2000, 1500)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a caption")
    return read_sources(tmp_path)


@pytest.mark.parametrize(("resolution", "size"), [(64, 128), (512, 1024), (800, None)])
def test_only_pictures_far_above_the_resolution_are_large(sources, resolution, size):
    text, fix = describe_large(sources, DataOptions(resolution=resolution))
    assert ("3.0 million pixels on average" in text, f"--size {size}" in fix) == (size is not None, size is not None)
    assert bool(text) == (size is not None)


def test_latents_need_no_pictures(sources):
    cached = [replace(source, latents="ondemand") for source in sources]
    assert describe_large(cached, DataOptions(resolution=64)) == ("", "")


def test_doctor_warns_of_them(sources):
    (found,) = look_at_sizes(Recipe("ldm", None, DataOptions(resolution=64), None), sources)
    assert (found.status, found.name) == ("warning", "pictures") and "convert" in found.fix
    assert not [*look_at_sizes(Recipe("ldm", None, DataOptions(resolution=800), None), sources)]
