"""What `ppldm precompute` leaves: files that hold what encoding gives, whatever stopped it, batch by batch."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppldm.data.cached.key import unfinished_path
from ppldm.data.cached.latents import Latents
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.images.crop import CropRule
from ppldm.data.select.parse import parse_where
from ppldm.data.shapes import NO_SHAPE, ShapeRule
from ppldm.inference.precompute import latents_plan
from ppldm.inference.precompute.command import settle
from ppldm.inference.precompute.encode_part import Account, encode_part
from ppldm.inference.precompute.latents_plan import choose_rows, list_tasks, project
from ppldm.utils.errors import ConfigError, DiskFullError

ROWS, BAD = 13, 4


class FakeEncoder:
    """Means of blocks of 8 x 8 pixels, and their spread. Stops, as a kill does, after `most` batches."""

    batch_size, digest, channels, factor = 4, "abc", 3, 8

    def __init__(self, most=1000):
        self.most, self.sizes = most, []

    def __call__(self, pixels):
        if len(self.sizes) == self.most:
            raise KeyboardInterrupt
        self.sizes.append(len(pixels))
        n, _, height, width = pixels.shape
        blocks = pixels.reshape(n, 3, height // 8, 8, width // 8, 8).astype(np.float32) / 255
        return np.stack([blocks.mean((3, 5)), blocks.std((3, 5))], 1)


def make_image(number, size) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def sources(tmp_path):
    rows = [Row(f"row {i}", make_image(i, (40 - 20 * (i == 7), 36)), {"n": i}) for i in range(ROWS)]
    rows[BAD] = Row("bad", b"\xff\xd8\xffnot", {"n": BAD, "width": 40, "height": 36})
    write_part(tmp_path / "part-0.gz", rows[:9])
    write_part(tmp_path / "part-1.gz", rows[9:])
    write_filelist(tmp_path / "x.filelist", ["part-0.gz", "part-1.gz"])
    return read_sources(tmp_path / "x.filelist")


def make_tasks(sources, where=None, folder=None, dtype="float32", sizes=(16, 32), engine="eager", **crops):
    condition = where and parse_where(where)
    chosen = choose_rows(sources, condition, list(sizes), 1)
    rule = CropRule(**{"num_crops": 2, "flip": True, **crops})
    settings = settle(FakeEncoder(), [shapes for shapes, _ in chosen], rule, dtype, folder, engine)
    return list_tasks(settings, sources, [selection for _, selection in chosen])


def encode(tasks, encoder=None) -> Account:
    with ThreadPoolExecutor(2) as pool:
        return sum((encode_part(task, encoder or FakeEncoder(), pool) for task in tasks), Account())


def contents(tasks) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for task in tasks for path in task.paths if path.exists()}


def test_moments_are_those_of_the_crops_that_training_draws(sources):
    tasks = make_tasks(sources)
    account = encode(tasks)
    # Row 7 is too small for 32 and thus not wanted there.
    assert account.encoded == 4 * (2 * ROWS - 2 - 1) and account.bad == {"image": 8} and account.found == 0
    rule = tasks[0].settings.crops
    for task in tasks:
        part = task_part(task)
        for side, path, key, rows in zip((16, 32), task.paths, task.keys, task.rows, strict=True):
            latents = Latents(path, key)
            for row in rows.tolist():
                if part.read(row).caption == "bad":
                    assert [latents.reason(row, variant) for variant in range(4)] == ["image"] * 4
                    continue
                assert latents.captions(row) == [part.read(row).caption] and latents.meta(row) == part.read(row).meta
                for crop in rule.list_variants():
                    pixels = np.empty((3, side, side), np.uint8)
                    rule.load(part.read(row).image, crop, row, pixels)
                    assert (latents.read(row, rule.variant(crop)) == FakeEncoder()(pixels[None])[0]).all()
    again = encode(tasks)
    assert again.encoded == 0 and again.found == account.encoded and again.bad == account.bad


def task_part(task):
    from ppldm.data.formats.open import open_part

    return open_part(task.path, task.source)


@pytest.mark.parametrize("enlarge", [False, True])
def test_rows_of_buckets_have_the_shapes_of_the_selection(sources, enlarge):
    rule = ShapeRule(((16, 16), (16, 24), (24, 16), (32, 40)), enlarge)
    tasks = make_tasks(sources, "n!=2", sizes=[rule], enlarge=enlarge, random=False, smart=True)
    assert encode(tasks).bad == {"image": 2}
    seen = 0
    for task in tasks:
        part, (latents,) = (
            task_part(task),
            [Latents(path, key) for path, key in zip(task.paths, task.keys, strict=True)],
        )
        for row, code in zip(task.rows[0].tolist(), task.codes[0].tolist(), strict=True):
            height, width = latents.shape(row)
            assert latents.codes[row] == code != NO_SHAPE and (height, width) == latents.key.shapes[code]
            if part.read(row).caption == "bad":
                continue
            for variant, crop in enumerate(task.settings.crops.list_variants()):
                pixels = np.empty((3, height, width), np.uint8)
                task.settings.crops.load(part.read(row).image, crop, row, pixels)
                assert (latents.read(row, variant) == FakeEncoder()(pixels[None])[0]).all()
                seen += 1
    assert seen == 2 * (ROWS - 2)
    missing = [latents.states[2].any() for latents in [Latents(tasks[0].paths[0])]]
    assert missing == [False]  # the row that the condition leaves out


def test_sides_that_the_vae_cannot_encode_are_refused(sources):
    with pytest.raises(ConfigError, match="pictures of 20 x 20 cannot be encoded; .* multiples of 8"):
        make_tasks(sources, sizes=[16, 20])


@pytest.mark.parametrize("most", [0, 1, 5, 11, 20])
def test_stopped_and_started_again_it_leaves_the_same_files(sources, tmp_path, most):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight, stopped = make_tasks(sources, folder=tmp_path / "a"), make_tasks(sources, folder=tmp_path / "b")
    encode(straight)
    with pytest.raises(KeyboardInterrupt):
        encode(stopped, FakeEncoder(most))
    for task in stopped:  # finished or absent
        for path, key, rows in zip(task.paths, task.keys, task.rows, strict=True):
            assert not path.exists() or Latents(path, key).states[rows].all()
    encode(stopped)
    assert contents(straight) == contents(stopped) and len(contents(straight)) == 4
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(contents(straight))


@pytest.mark.parametrize("began, other", [("eager", "openvino"), ("openvino", "eager")])
def test_rows_of_two_engines_are_never_in_one_file(sources, tmp_path, began, other):
    tasks = make_tasks(sources, engine=began)
    with pytest.raises(KeyboardInterrupt):
        encode(tasks, FakeEncoder(most=3))
    with pytest.raises(ConfigError, match=f"computed with --engine {began}; complete it with .* --engine {began}`"):
        encode(make_tasks(sources, engine=other))
    assert encode(tasks).encoded
    made = contents(tasks)
    assert all(Latents(path).engine == began for task in tasks for path in task.paths)
    assert encode(make_tasks(sources, engine=other)).encoded == 0 and contents(tasks) == made


def test_a_shape_is_done_with_before_the_next(sources):
    """So that an engine, which compiles for a shape and keeps few, seldom compiles."""
    tasks = make_tasks(sources, sizes=(ShapeRule(((16, 32), (32, 16), (16, 16)), False),))
    shapes = []

    class Noting(FakeEncoder):
        def __call__(self, pixels):
            shapes.append(pixels.shape[2:])
            return super().__call__(pixels)

    for task in tasks:
        shapes.clear()
        encode([task], Noting())
        assert shapes == sorted(shapes) and shapes


def test_what_another_condition_selects_is_filled_in(sources):
    some, all_rows = make_tasks(sources, "n<6 or n==10"), make_tasks(sources)
    assert contents(all_rows) == {}
    first = encode(some)
    before = contents(all_rows)
    second = encode(all_rows)
    assert first.encoded and second.found == first.encoded and len(before) == 4
    made = contents(all_rows)
    for path in (path for task in all_rows for path in task.paths):
        path.unlink()
    encode(all_rows)
    assert contents(all_rows) == made


def flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["magic", "header", "texts", "state", "bad state", "moments", "last"])
def test_the_same_command_repairs_what_is_damaged(sources, place):
    tasks = make_tasks(sources, dtype="float16")
    encode(tasks)
    whole = contents(tasks)
    path = tasks[0].paths[1]
    data = whole[path.name]
    states = data.index(bytes([1] * 4 * BAD)) + BAD * 4
    places = {"magic": 0, "header": 30, "texts": data.index(b"row 3"), "state": states - 1, "bad state": states + 1,
              "moments": -3000, "last": -1}  # fmt: skip
    flip_bit(path, places[place])
    account = encode(tasks)
    assert contents(tasks) == whole and account.encoded + account.repaired > 0


def test_a_row_that_could_not_be_read_is_tried_again(sources):
    (task, *_) = make_tasks(sources)
    encode([task])
    whole = contents([task])
    latents = Latents(task.paths[0], writable=True)
    latents.mark_bad(2, 1, "unreadable")
    assert encode([task]).encoded == 1 and contents([task]) == whole


def test_values_that_are_not_finite_are_bad_rows(sources):
    class Broken(FakeEncoder):
        def __call__(self, pixels):
            found = super().__call__(pixels)
            found[pixels.sum((1, 2, 3)) % 2 == 0, 1] = np.nan
            return found

    account = encode(make_tasks(sources), Broken())
    assert account.bad["not_finite"] > 5 and account.encoded > 5
    assert account.encoded + account.bad.total() == sum(task.num_cells for task in make_tasks(sources))


def test_bytes_are_projected_and_a_small_disk_is_refused(sources, monkeypatch, tmp_path):
    tasks = make_tasks(sources)
    (before,) = project([(tasks, 20)])
    assert before.files == 4 and before.finished == 0 and before.cells == (4 * ROWS, 4 * (ROWS - 1))
    encode(tasks)
    written = sum(len(data) for data in contents(tasks).values())
    assert 0.9 * written < before.bytes < 1.1 * written + 4096
    (after,) = project([(tasks, 20)])
    assert after.finished == 4 and after.bytes == 0 and after.cells == (0, 0)
    others = [replace(task, settings=replace(task.settings, dtype="float16")) for task in tasks]
    monkeypatch.setattr(latents_plan, "count_free_bytes", lambda folder: 10)
    assert project([(tasks, 20)]) == [after]
    with pytest.raises(DiskFullError, match="that needs .* GB, and .* has 0.000 GB free"):
        project([(tasks, 20), (others, 20)])
    assert not any(unfinished_path(path).exists() for task in others for path in task.paths)
