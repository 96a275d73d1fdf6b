"""What `ppldm precompute` leaves: files that hold what encoding gives, whatever stopped it, batch by batch."""

import io
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ppldm.cache import plan as module
from ppldm.cache.command import Account, encode_part
from ppldm.cache.plan import EmbeddingsRequest, LatentsRequest, check_disks, choose_rows, make_plan, project
from ppldm.data.cached.file import CachedFile, Latents, unfinished_path
from ppldm.data.cached.key import EmbeddingsKey
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.open import open_part
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.data.select.expression import parse_where
from ppldm.data.shapes import NO_SHAPE, ShapeRule
from ppldm.data.text.captions import CaptionRule
from ppldm.utils.errors import ConfigError, DiskFullError

ROWS, BAD, LACKING = 13, 4, 5  # rows; the one without a picture, the one without a caption
EMBEDDINGS = EmbeddingsKey(text_encoder="a", tokenizer="b", model_max_length=5, mask_pad_tokens=False, dtype="float32")
CAPTIONS = CaptionRule(weights=(("caption", 1.0), ("blip", 1.0)))
CROPS = CropRule(num_crops=2, flip=True)


class FakeEncoder:
    """Stops, as a kill does, after `most` batches."""

    batch_size, measured = 4, False

    def __init__(self, most=1000):
        self.most, self.sizes = most, []

    def __call__(self, inputs):
        if len(self.sizes) == self.most:
            raise KeyboardInterrupt
        self.sizes.append(len(inputs))
        return np.stack([self.encode(one) for one in inputs])


class Blocks(FakeEncoder):
    """Means of blocks of 8 x 8 pixels, and their spread."""

    digest, header = "abc", {"channels": 3, "factor": 8}

    def encode(self, pixels):
        _, height, width = pixels.shape
        blocks = pixels.reshape(3, height // 8, 8, width // 8, 8).astype(np.float32) / 255
        return np.stack([blocks.mean((2, 4)), blocks.std((2, 4))])


class Numbers(FakeEncoder):
    """Numbers that a caption decides."""

    key, digest, header = EMBEDDINGS, EMBEDDINGS.digest, {"width": 3}

    def encode(self, text):
        return np.random.default_rng(zlib.crc32(text.encode())).standard_normal((5, 3)).astype(np.float32)


def make_image(number, size) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def texts_of(number: int) -> list[str]:
    return [] if number == LACKING else [f"row {number}", *["a", f"b {number}"][: number % 3]]


@pytest.fixture
def sources(tmp_path):
    rows = [Row(f"row {i}", make_image(i, (40 - 20 * (i == 7), 36)), {"n": i, "blip": texts_of(i)[1:]})
            for i in range(ROWS)]  # fmt: skip
    rows[BAD] = Row("row 4", b"\xff\xd8\xffnot", {"n": BAD, "width": 40, "height": 36, "blip": texts_of(BAD)[1:]})
    rows[LACKING] = Row(" ", rows[LACKING].image, {"n": LACKING})
    write_part(tmp_path / "part-0.gz", rows[:9])
    write_part(tmp_path / "part-1.gz", rows[9:])
    write_filelist(tmp_path / "x.filelist", ["part-0.gz", "part-1.gz"])
    return read_sources(tmp_path / "x.filelist")


@dataclass
class Kind:
    """Of files: its encoder, a request with some settings changed, sizes, and how many files a part has."""

    encoder: type
    request: Any
    sizes: tuple
    files: int

    def plan(self, sources, where=None, folder=None, sizes=None, **changes):
        chosen = choose_rows(sources, where and parse_where(where), list(sizes or self.sizes), 1)
        return make_plan(self.request(**changes), self.encoder(), sources, chosen, folder)

    def encode(self, plan, encoder=None, parts=slice(None)) -> Account:
        with ThreadPoolExecutor(2) as pool:
            return sum((encode_part(task, encoder or self.encoder(), pool) for task in plan.tasks[parts]), Account())


def request_latents(dtype="float32", engine="eager", **crops):
    rule = CropRule(**{**vars(CROPS), **crops})
    return LatentsRequest(model="vae", dtype=dtype, engine=engine, batch_size=4, crops=rule)


def request_embeddings(captions=CAPTIONS):
    return EmbeddingsRequest(model="clip", dtype="float32", batch_size=4, model_max_length=5, captions=captions)


LATENTS = Kind(Blocks, request_latents, (16, 32), 2)
TEXTS = Kind(Numbers, request_embeddings, (0,), 1)


@pytest.fixture(params=[LATENTS, TEXTS], ids=["latents", "embeddings"])
def kind(request) -> Kind:
    return request.param


def measure(plan):
    with ThreadPoolExecutor(2) as pool:
        return project(plan, pool)


def files_of(plan) -> list:
    return [file for task in plan.tasks for file in task.files]


def contents(plan) -> dict[str, bytes]:
    return {file.path.name: file.path.read_bytes() for file in files_of(plan) if file.path.exists()}


def test_moments_are_those_of_the_crops_that_training_draws(sources):
    plan = LATENTS.plan(sources)
    account = LATENTS.encode(plan)
    # Row 7 is too small for 32 and thus not wanted there.
    assert account.encoded == 4 * (2 * ROWS - 2 - 1) and account.bad == {"image": 8} and account.found == 0
    for task in plan.tasks:
        part = open_part(task.path, task.source)
        for side, file in zip((16, 32), task.files, strict=True):
            latents = Latents(file.path, file.key)
            for row in file.rows.tolist():
                if part.read(row).meta["n"] == BAD:
                    assert [latents.reason(row, variant) for variant in range(4)] == ["image"] * 4
                    continue
                assert (
                    latents.texts(row).caption == part.read(row).caption
                    and latents.texts(row).meta == part.read(row).meta
                )
                for crop in CROPS.list_variants():
                    pixels = np.empty((3, side, side), np.uint8)
                    CROPS.cut(CROPS.decode(part.read(row).image), crop, row, pixels)
                    assert (latents.read(row, CROPS.variant(crop)) == Blocks()(pixels[None])[0]).all()
    again = LATENTS.encode(plan)
    assert again.encoded == 0 and again.found == account.encoded and again.bad == account.bad


def test_each_text_that_may_be_drawn_and_the_empty_caption_are_there(sources):
    plan = TEXTS.plan(sources)
    account, embed, row = TEXTS.encode(plan), Numbers().encode, 0
    assert account.bad == {"no_caption": 1} and account.found == 0
    assert account.encoded == sum(len(texts_of(i)) for i in range(ROWS)) + 2
    for wanted, count in zip(files_of(plan), (9, 4), strict=True):
        file = CachedFile(wanted.path, wanted.key)
        assert len(file) == count + 1 and (file.read(count, 0) == embed("")).all()
        for number in range(count):
            texts = texts_of(row)
            assert file.codes[number] == len(texts) and (file.reason(number, 0) == "no_caption") == (not texts)
            for place, text in enumerate(texts):
                assert (file.read(number, place) == embed(text)).all()
            row += 1
    again = TEXTS.encode(plan)
    assert again.encoded == 0 and again.found == account.encoded and again.bad == account.bad


@pytest.mark.parametrize("enlarge", [False, True])
def test_rows_of_buckets_have_the_shapes_of_the_selection(sources, enlarge):
    rule = ShapeRule(((16, 16), (16, 24), (24, 16), (32, 40)), enlarge)
    plan = LATENTS.plan(sources, "n!=2", sizes=[rule], enlarge=enlarge, random=False, num_crops=0, smart=True)
    assert LATENTS.encode(plan).bad == {"image": 2}
    crops, seen = plan.request.crops, 0
    for task in plan.tasks:
        part, (file,) = open_part(task.path, task.source), task.files
        latents = Latents(file.path, file.key)
        for row, code in zip(file.rows.tolist(), file.codes.tolist(), strict=True):
            height, width = latents.shape(row)
            assert latents.codes[row] == code != NO_SHAPE and (height, width) == latents.key.shapes[code]
            if part.read(row).meta["n"] == BAD:
                continue
            for variant, crop in enumerate(crops.list_variants()):
                pixels = np.empty((3, height, width), np.uint8)
                crops.cut(crops.decode(part.read(row).image), crop, row, pixels)
                assert (latents.read(row, variant) == Blocks()(pixels[None])[0]).all()
                seen += 1
    assert seen == 2 * (ROWS - 2)
    assert not Latents(files_of(plan)[0].path).states[2].any()  # the row that the condition leaves out


def test_sides_that_the_vae_cannot_encode_are_refused(sources):
    with pytest.raises(ConfigError, match="pictures of 20 x 20 cannot be encoded; .* multiples of 8"):
        LATENTS.plan(sources, sizes=[16, 20])


@pytest.mark.parametrize("most", [0, 1, 3, 5, 11, 20])
def test_stopped_and_started_again_it_leaves_the_same_files(kind, sources, tmp_path, most):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight, stopped = kind.plan(sources, folder=tmp_path / "a"), kind.plan(sources, folder=tmp_path / "b")
    counting = kind.encoder()
    kind.encode(straight, counting)
    if most < len(counting.sizes):
        with pytest.raises(KeyboardInterrupt):
            kind.encode(stopped, kind.encoder(most))
    for file in files_of(stopped):  # finished or absent
        assert not file.path.exists() or CachedFile(file.path, file.key).states[file.rows, 0].all()
    kind.encode(stopped)
    assert contents(straight) == contents(stopped) and len(contents(straight)) == 2 * kind.files
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(contents(straight))


@pytest.mark.parametrize("began, other", [("eager", "openvino"), ("openvino", "eager")])
def test_rows_of_two_engines_are_never_in_one_file(sources, began, other):
    plan, others = LATENTS.plan(sources, engine=began), LATENTS.plan(sources, engine=other)
    with pytest.raises(KeyboardInterrupt):
        LATENTS.encode(plan, Blocks(most=3))
    with pytest.raises(ConfigError, match=f"computed with --engine {began}; complete it with .* --engine {began}`"):
        LATENTS.encode(others)
    assert LATENTS.encode(plan).encoded
    made = contents(plan)
    assert all(Latents(file.path).header.get("engine", "eager") == began for file in files_of(plan))
    assert LATENTS.encode(others).encoded == 0 and contents(plan) == made


def test_a_shape_is_done_with_before_the_next(sources):
    """So that an engine, which compiles for a shape and keeps few, seldom compiles."""
    plan = LATENTS.plan(sources, sizes=(ShapeRule(((16, 32), (32, 16), (16, 16)), False),))
    shapes = []

    class Noting(Blocks):
        def encode(self, pixels):
            shapes.append(pixels.shape[1:])
            return super().encode(pixels)

    for number in range(2):
        shapes.clear()
        LATENTS.encode(plan, Noting(), slice(number, number + 1))
        assert shapes == sorted(shapes) and shapes


def test_what_another_condition_selects_is_filled_in(kind, sources):
    some, every = kind.plan(sources, "n<6 or n==10"), kind.plan(sources)
    assert contents(every) == {}
    first = kind.encode(some)
    assert len(contents(every)) == 2 * kind.files
    second = kind.encode(every)
    assert first.encoded and second.found == first.encoded
    made = contents(every)
    for file in files_of(every):
        file.path.unlink()
    kind.encode(every)
    assert contents(every) == made


DAMAGES = [
    *((LATENTS, place) for place in ("magic", "header", "texts", "state", "bad state", "array", "last")),
    *((TEXTS, place) for place in ("header", "codes", "state", "bad state", "last")),
]


@pytest.mark.parametrize("kind, place", DAMAGES, ids=[f"{kind.encoder.__name__}-{place}" for kind, place in DAMAGES])
def test_the_same_command_repairs_what_is_damaged(kind, sources, place):
    plan = kind.plan(sources, **({"dtype": "float16"} if kind is LATENTS else {}))
    kind.encode(plan)
    whole, path = contents(plan), plan.tasks[0].files[-1].path
    data = bytearray(path.read_bytes())
    places = {"magic": 0, "header": 30, "array": -3000, "last": -1}
    if kind is LATENTS:
        states = data.index(bytes([1] * 4 * BAD)) + BAD * 4
        places |= {"texts": data.index(b"row 3"), "state": states - 1, "bad state": states + 1}
    else:
        states = data.index(bytes([1, 0, 0, 1, 1, 0, 1, 1, 1]))
        places |= {"codes": data.index(bytes([1, 2, 3, 1, 2, 0])), "state": states, "bad state": states + 3 * LACKING}
    data[places[place]] ^= 16
    path.write_bytes(data)
    account = kind.encode(plan)
    assert contents(plan) == whole and account.encoded + account.repaired > 0


def test_a_row_that_could_not_be_read_is_tried_again(kind, sources):
    plan, first = kind.plan(sources), slice(1)
    kind.encode(plan, parts=first)
    whole = contents(plan)
    CachedFile(plan.tasks[0].files[0].path, writable=True).mark_bad(2, 1, "unreadable")
    assert kind.encode(plan, parts=first).encoded == 1 and contents(plan) == whole


def test_values_that_are_not_finite_are_bad_rows(kind, sources):
    class Broken(kind.encoder):
        def encode(self, one):
            found = super().encode(one)
            found[1] = np.nan if found[0, 0].sum() * 1000 % 2 < 1 else found[1]
            return found

    plan = kind.plan(sources)
    account = kind.encode(plan, Broken())
    assert account.bad["not_finite"] > 5 and account.encoded > 5
    # Every array is accounted for: crops of pictures, texts of rows, why a row has none, and two empty captions.
    texts = sum(max(1, len(texts_of(i))) for i in range(ROWS)) + 2
    every = 4 * sum(task.num_rows for task in plan.tasks) if kind is LATENTS else texts
    assert account.encoded + account.bad.total() == every


def test_other_texts_of_the_same_part_are_a_file_made_again(sources, monkeypatch):
    """As where a picture's own file of texts could not be read when the file was made."""
    plan, first = TEXTS.plan(sources), slice(1)
    with monkeypatch.context() as patched:
        patched.setattr(CaptionRule, "texts", lambda rule, row: [row.caption])
        TEXTS.encode(plan, parts=first)
    path = plan.tasks[0].files[0].path
    assert CachedFile(path).codes.tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]
    TEXTS.encode(plan, parts=first)
    assert CachedFile(path).codes.tolist() == [1, 2, 3, 1, 2, 0, 1, 2, 3, 1]


def test_bytes_are_projected_and_a_small_disk_is_refused(kind, sources, monkeypatch):
    plan = kind.plan(sources)
    before = measure(plan)
    assert len(before.seconds) == kind.files and min(before.seconds) >= 0
    assert before.files == 2 * kind.files and before.finished == 0
    # Of captions by the first four rows of the first part, which have 1, 2, 3 and 1.
    captions = round(9 * 7 / 4) + 1 + round(4 * 7 / 4) + 1
    assert before.cells == ([4 * ROWS, 4 * (ROWS - 1)] if kind is LATENTS else [captions])
    kind.encode(plan)
    written = sum(len(data) for data in contents(plan).values())
    near = 0.1 if kind is LATENTS else 0.5
    assert (1 - near) * written < sum(size for _, size in before.needed) < (1 + near) * written + 4096
    after = measure(plan)
    assert after.finished == after.files and after.needed == [] and after.cells == [0] * kind.files
    other = kind.plan(sources, **({"dtype": "float16"} if kind is LATENTS else {"captions": CaptionRule()}))
    monkeypatch.setattr(module, "count_free_bytes", lambda folder: 10)
    check_disks([after])
    with pytest.raises(DiskFullError, match="that needs .* GB, and .* has 0.000 GB free"):
        check_disks([after, measure(other)])
    assert not any(unfinished_path(file.path).exists() for file in files_of(other))


def test_files_lie_beside_their_parts_unless_a_folder_is_named(kind, sources, tmp_path):
    assert {file.path.parent for file in files_of(kind.plan(sources))} == {Path(sources[0].parts[0]).parent}
    assert {file.path.parent for file in files_of(kind.plan(sources, folder=tmp_path / "a"))} == {tmp_path / "a"}
