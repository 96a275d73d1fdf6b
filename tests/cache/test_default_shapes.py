"""Law: what `ppldm precompute` makes by default serves training with any batch size, each row in its own shape."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.cache.command import encode_part, read_sizes
from ppldm.cache.plan import LatentsRequest, choose_rows, make_plan, project
from ppldm.config.data import DataOptions
from ppldm.data.cached.run import CachedMoments, LatentsRule
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.open import OpenParts
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.data.inputs import Moments
from ppldm.data.select.selection import select_rows
from ppldm.data.shapes import shape_rule
from ppldm.utils.errors import PartError

CROPS, SIDE = CropRule(random=False), 32


class FakeEncoder:
    """Means of blocks of 8 x 8 pixels, and their spread."""

    batch_size, digest, header = 4, "abc", {"channels": 3, "factor": 8}
    measured = False

    def __call__(self, pixels):
        pixels = np.stack(pixels)
        n, _, height, width = pixels.shape
        blocks = pixels.reshape(n, 3, height // 8, 8, width // 8, 8).astype(np.float32) / 255
        return np.stack([blocks.mean((3, 5)), blocks.std((3, 5))], 1)


RULE = LatentsRule(FakeEncoder.digest, 1.0, "float32")


def picture(row: int, size) -> bytes:
    pixels = np.random.default_rng(row).integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_parts(folder, sizes) -> list:
    rows = [Row(f"row {row}", picture(row, size), {"n": row}) for row, size in enumerate(sizes)]
    write_part(folder / "a.gz", rows[: len(rows) // 2])
    write_part(folder / "b.gz", rows[len(rows) // 2 :])
    write_filelist(folder / "x.filelist", ["a.gz", "b.gz"])
    return read_sources(folder / "x.filelist", latents="cached")


def precompute(sources, data: DataOptions, folder=None) -> int:
    """As the command does; how many crops were encoded."""
    chosen = choose_rows(sources, None, read_sizes(data, [SIDE]), 1)
    request = LatentsRequest(model="vae", dtype="float32", batch_size=4, crops=CROPS)
    plan = make_plan(request, FakeEncoder(), sources, chosen, folder)
    with ThreadPoolExecutor(2) as pool:
        before = project(plan, pool)
        for task in plan.tasks:
            encode_part(task, plan.encoder, pool)
        after = project(plan, pool)
    assert after.finished == after.files == before.files and after.needed == []
    return sum(before.cells)


def train(sources, data: DataOptions, batch_size: int):
    """(what training reads of each row, the shape that it has there)."""
    rule = shape_rule(replace(data, resolution=SIDE), batch_size)
    selection = select_rows(sources, None, 0, 1, rule)
    parts = [(path, source) for source in sources for path in source.parts]
    rows = OpenParts(parts, 2, selection.contents)
    shapes = selection.buckets.shapes
    cached = CachedMoments(RULE, Moments(3, 8), CROPS, shapes, rows, selection)
    for number, (path, _) in enumerate(parts):
        for row, code in zip(*map(np.ndarray.tolist, selection.rows_of(number)), strict=True):
            yield path, row, shapes[code], cached.read(number, row, 0, shapes[code])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(4, 12), st.integers(4, 12)), min_size=2, max_size=24),
    buckets=st.sampled_from(["ratios", "steps", "32x32,48x24,24x48,64x16"]),
    batches=st.sets(st.integers(1, 24), min_size=1, max_size=3),
    upscale=st.booleans(),
)
def test_defaults_fit_any_batch_size(tmp_path_factory, sizes, buckets, batches, upscale):
    sources = make_parts(
        tmp_path_factory.mktemp("data"), [(8 * width, 8 * height) for width, height in [*sizes, (9, 9)]]
    )
    data = DataOptions(buckets=buckets, bucket_step=8, bucket_upscale=upscale)
    crops = replace(CROPS, enlarge=upscale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CROPS", crops)
        count = precompute(sources, data)
        seen = set()
        for batch_size in sorted(batches):
            for path, row, shape, (texts, moments) in train(sources, data, batch_size):
                read = Part(path).read(row)
                pixels = np.empty((3, *shape), np.uint8)
                crops.cut(crops.decode(read.image), crops.list_variants()[0], row, pixels)
                assert np.array_equal(moments, FakeEncoder()(pixels[None])[0]) and texts.caption == read.caption
                seen.add((path, row, shape))
        assert len(seen) <= count


def test_another_group_than_any_is_refused_with_the_command_that_makes_it(tmp_path):
    sizes = [(32, 32)] * 6 + [(64, 32)] * 3
    sources = make_parts(tmp_path, sizes)
    data = DataOptions(buckets="32x32,64x32")
    one = replace(data, bucket_group_size=1)
    assert precompute(sources, one) == 9
    assert len(list(train(sources, one, 4))) == 9
    with pytest.raises(PartError, match="lacks latents of 3 rows in the shapes of this run.*ppldm precompute"):
        list(train(sources, data, 4))
    # What the default adds is what rows of rare shapes need.
    assert precompute(sources, data) == 3
    assert len(list(train(sources, data, 4))) == 9


def test_latents_of_another_resolution_are_none_of_a_run(tmp_path):
    sources = make_parts(tmp_path, [(64, 64)] * 4)
    precompute(sources, DataOptions(buckets="64x64"))
    with pytest.raises(PartError, match="shapes was .*64, 64.* and is .*32, 32"):
        list(train(sources, DataOptions(buckets="32x32"), 1))
