"""What `ppldm precompute` leaves of captions: files that hold what encoding gives, whatever stopped it."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from ppldm.data.cached.embeddings import EmbeddingsRule
from ppldm.data.cached.file import CachedFile
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.select.parse import parse_where
from ppldm.data.text.captions import CaptionRule
from ppldm.inference.precompute.encode_texts import encode_texts, measure_texts
from ppldm.inference.precompute.latents_plan import choose_rows, project
from ppldm.inference.precompute.part_files import Account
from ppldm.inference.precompute.texts_plan import TextSettings, list_text_tasks

ROWS, LACKING = 13, 4
RULE = EmbeddingsRule("a", "b", 5, False, "float32")
CAPTIONS = CaptionRule(weights=(("caption", 1.0), ("blip", 1.0)))


class FakeEncoder:
    """Numbers that a caption decides. Stops, as a kill does, after `most` batches."""

    batch_size, width = 4, 3

    def __init__(self, most=1000):
        self.most, self.sizes = most, []

    def __call__(self, captions):
        if len(self.sizes) == self.most:
            raise KeyboardInterrupt
        self.sizes.append(len(captions))
        return np.stack([embed(text) for text in captions])


def embed(text: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(text.encode())).standard_normal((5, 3)).astype(np.float32)


@pytest.fixture
def sources(tmp_path):
    rows = [Row(f"row {i}", b"picture", {"n": i, "width": 9, "height": 9, "blip": ["a", f"b {i}"][: i % 3]})
            for i in range(ROWS)]  # fmt: skip
    rows[LACKING] = Row(" ", b"picture", {"n": LACKING, "width": 9, "height": 9})
    write_part(tmp_path / "part-0.gz", rows[:9])
    write_part(tmp_path / "part-1.gz", rows[9:])
    write_filelist(tmp_path / "x.filelist", ["part-0.gz", "part-1.gz"])
    return read_sources(tmp_path / "x.filelist")


def make_tasks(sources, where=None, folder=None, captions=CAPTIONS, rule=RULE):
    chosen = choose_rows(sources, where and parse_where(where), [0], 1)
    settings = TextSettings(rule, 3, captions, folder)
    return list_text_tasks(settings, sources, [selection for _, selection in chosen])


def encode(tasks, encoder=None) -> Account:
    return sum((encode_texts(task, encoder or FakeEncoder(), None) for task in tasks), Account())


def contents(tasks) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for task in tasks for path in task.paths if path.exists()}


def texts_of(i: int) -> list[str]:
    return [] if i == LACKING else [f"row {i}", *["a", f"b {i}"][: i % 3]]


def test_each_text_that_may_be_drawn_and_the_empty_caption_are_there(sources):
    tasks = make_tasks(sources)
    account, row = encode(tasks), 0
    assert account.bad == {"no_caption": 1} and account.found == 0
    assert account.encoded == sum(len(texts_of(i)) for i in range(ROWS)) + 2
    for task, count in zip(tasks, (9, 4), strict=True):
        file = CachedFile(task.paths[0], task.keys[0])
        assert len(file) == count + 1 and (file.read(count, 0) == embed("")).all()
        for number in range(count):
            texts = texts_of(row)
            assert file.codes[number] == len(texts) and (file.reason(number, 0) == "no_caption") == (not texts)
            for place, text in enumerate(texts):
                assert (file.read(number, place) == embed(text)).all()
            row += 1
    again = encode(tasks)
    assert again.encoded == 0 and again.found == account.encoded and again.bad == account.bad


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_stopped_and_started_again_it_leaves_the_same_files(sources, tmp_path, most):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    straight, stopped = make_tasks(sources, folder=tmp_path / "a"), make_tasks(sources, folder=tmp_path / "b")
    encode(straight)
    with pytest.raises(KeyboardInterrupt):
        encode(stopped, FakeEncoder(most))
    for task in stopped:  # finished or absent
        assert not task.paths[0].exists() or CachedFile(task.paths[0]).states[:, 0].all()
    encode(stopped)
    assert contents(straight) == contents(stopped) and len(contents(straight)) == 2
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(contents(straight))


def test_what_another_condition_selects_is_filled_in(sources):
    some, all_rows = make_tasks(sources, "n<6 or n==10"), make_tasks(sources)
    first = encode(some)
    assert encode(all_rows).found == first.encoded
    made = contents(all_rows)
    for path in (path for task in all_rows for path in task.paths):
        path.unlink()
    encode(all_rows)
    assert contents(all_rows) == made


@pytest.mark.parametrize("place", ["header", "codes", "state", "bad state", "last"])
def test_the_same_command_repairs_what_is_damaged(sources, place):
    tasks = make_tasks(sources)
    encode(tasks)
    whole, path = contents(tasks), tasks[0].paths[0]
    data = bytearray(path.read_bytes())
    codes = data.index(bytes([1, 2, 3, 1, 0]))
    states = data.index(bytes([1, 0, 0, 1, 1, 0, 1, 1, 1]))
    data[{"header": 30, "codes": codes, "state": states, "bad state": states + 3 * LACKING, "last": -1}[place]] ^= 16
    path.write_bytes(data)
    account = encode(tasks)
    assert contents(tasks) == whole and account.encoded + account.repaired > 0


def test_a_row_that_could_not_be_read_is_tried_again(sources):
    (task, *_) = make_tasks(sources)
    encode([task])
    whole = contents([task])
    CachedFile(task.paths[0], writable=True).mark_bad(2, 1, "unreadable")
    assert encode([task]).encoded == 1 and contents([task]) == whole


def test_other_texts_of_the_same_part_are_a_file_made_again(sources, monkeypatch):
    """As where a picture's own file of texts could not be read when the file was made."""
    (task, *_) = make_tasks(sources)
    with monkeypatch.context() as patched:
        patched.setattr(CaptionRule, "texts", lambda rule, row: [row.caption])
        encode([task])
    assert CachedFile(task.paths[0]).codes.tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    encode([task])
    assert CachedFile(task.paths[0]).codes.tolist() == [1, 2, 3, 1, 0, 3, 1, 2, 3, 1]


def test_bytes_are_projected(sources):
    tasks = make_tasks(sources)
    size, (seconds,) = measure_texts(tasks[0], FakeEncoder(), None)
    assert size == np.mean([1, 2, 3, 1]) and seconds >= 0
    (before,) = project([(tasks, size)])
    assert before.files == 2 and before.finished == 0
    encode(tasks)
    (after,) = project([(tasks, size)])
    written = sum(map(len, contents(tasks).values()))
    assert 0.5 * written < before.bytes < 1.5 * written + 4096 and after.finished == 2 and after.bytes == 0


def test_files_lie_beside_their_parts_unless_a_folder_is_named(sources, tmp_path):
    assert {path.parent for task in make_tasks(sources) for path in task.paths} == {Path(sources[0].parts[0]).parent}
    assert make_tasks(sources, folder=tmp_path / "a")[0].paths[0].parent == tmp_path / "a"
