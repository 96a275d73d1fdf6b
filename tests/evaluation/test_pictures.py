"""Sets of pictures: the same pictures have the same digest wherever they lie, and bad ones are counted."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.evaluation.pictures import RESIZE, open_pictures
from ppldm.inference.pictures.draw import SETTINGS_CHUNK
from ppldm.utils.errors import DataError
from ppldm.utils.pictures import save_png


def fill(folder, count=5, size=(8, 8), seed=0):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    pictures = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]
    for number, picture in enumerate(pictures):
        save_png(folder / f"{number:02d}.png", picture)
    return pictures


def test_a_folder_is_its_pictures_in_the_order_of_their_names(tmp_path):
    pictures = fill(tmp_path / "a")
    (tmp_path / "a" / "03.txt").write_text("a  red\nheart")
    (tmp_path / "a" / "notes.md").write_text("x")
    found = open_pictures(tmp_path / "a")
    assert len(found) == 5 and found.ids == [f"{n:02d}.png" for n in range(5)]
    assert all((one == other).all() for one, other in zip(found, pictures, strict=True))
    assert found.captions == [None, None, None, "a red heart", None]
    facts = {"count": 5, "size": "8x8", "resize": None, "enlarged": 0, "formats": "PNG", "skipped": {}}
    assert found.facts == facts


def test_the_digest_follows_ids_and_bytes_and_nothing_else(tmp_path):
    fill(tmp_path / "a")
    digest = open_pictures(tmp_path / "a").digest
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert open_pictures(tmp_path / "b").digest == digest
    assert open_pictures(tmp_path / "b", resolution=4).digest != digest
    assert open_pictures(tmp_path / "b", resolution=8).digest == digest
    assert open_pictures(tmp_path / "b", limit=3).digest != digest
    (tmp_path / "b" / "00.png").rename(tmp_path / "b" / "00a.png")  # in the same place
    renamed = open_pictures(tmp_path / "b").digest
    save_png(tmp_path / "b" / "00a.png", np.zeros((8, 8, 3), np.uint8))
    assert len({digest, renamed, open_pictures(tmp_path / "b").digest}) == 3


def test_rows_that_cannot_be_read_are_counted_and_others_take_their_place(tmp_path, capfd):
    pictures = fill(tmp_path / "a", 6)
    images = [(tmp_path / "a" / f"{n:02d}.png").read_bytes() for n in range(6)]
    images[2] = images[2][:50]
    rows = [Row(f"caption {n}", image, {}) for n, image in enumerate(images)]
    write_part(tmp_path / "part-0.gz", rows[:4])
    write_part(tmp_path / "part-1.gz", rows[4:])
    write_filelist(tmp_path / "x.filelist", ["part-0.gz", "part-1.gz"])
    found = open_pictures(tmp_path / "x.filelist")
    assert found.ids == [f"part-{n // 4}.gz:{n % 4}" for n in (0, 1, 3, 4, 5)]
    assert found.captions == [f"caption {n}" for n in (0, 1, 3, 4, 5)] and found.facts["skipped"] == {"image": 1}
    assert (found[2] == pictures[3]).all() and (found[-1] == pictures[5]).all()
    assert "1 pictures cannot be read" in capfd.readouterr().err
    chosen = [open_pictures(tmp_path / "x.filelist", limit=4, seed=seed).ids for seed in range(8)]
    assert all(len(ids) == 4 and set(ids) < set(found.ids) | {"x"} and ids == sorted(ids) for ids in chosen)
    assert len(set(map(tuple, chosen))) > 1
    assert chosen[3] == open_pictures(tmp_path / "x.filelist", limit=4, seed=3).ids


def test_pictures_are_resized_as_pillow_does_and_those_of_the_size_are_left_alone(tmp_path):
    (large,) = fill(tmp_path / "a", 1, (40, 64))
    found = open_pictures(tmp_path / "a", resolution=16)
    whole = Image.fromarray(large).resize((25, 16), Image.Resampling.LANCZOS)
    assert (found[0] == np.asarray(whole)[:, 5:21]).all()
    assert found.facts["resize"] == RESIZE and found.facts["size"] == "16x16"
    (same,) = fill(tmp_path / "b", 1, (16, 16))
    assert (open_pictures(tmp_path / "b", resolution=16)[0] == same).all()
    assert open_pictures(tmp_path / "b", resolution=16).facts["resize"] is None
    assert open_pictures(tmp_path / "b", resolution=20).facts["enlarged"] == 1
    fill(tmp_path / "b", 2, (8, 16))
    assert open_pictures(tmp_path / "b").facts["size"] == "16x8"


def test_pictures_of_generate_say_how_they_were_drawn_and_their_grid_is_none_of_them(tmp_path):
    def draw(**settings):
        for number, prompt in enumerate(("a red heart", "a boat")):
            record = {"prompt": prompt, "seed": 5, "sampler": "ddim", "index": number, **settings}
            texts = {SETTINGS_CHUNK: json.dumps(record)}
            save_png(tmp_path / f"{number:03d}-00.png", np.zeros((4, 4, 3), np.uint8), texts)

    draw()
    save_png(tmp_path / "grid.png", np.zeros((9, 9, 3), np.uint8))
    found = open_pictures(tmp_path)
    assert found.captions == ["a red heart", "a boat"] and found.drawn == {"seed": 5, "sampler": "ddim"}
    assert len(found) == 2
    draw(weights="other")
    assert open_pictures(tmp_path).requests == found.requests
    draw(sampler="lms")
    assert open_pictures(tmp_path).requests == found.requests and open_pictures(tmp_path).drawn["sampler"] == "lms"
    draw(prompt="a house")
    assert open_pictures(tmp_path).requests != found.requests


def test_folders_without_pictures_are_named(tmp_path):
    with pytest.raises(DataError, match=r"hold no pictures \(jpg, .*\); name another"):
        open_pictures(tmp_path)
    for number, guidance in enumerate(("g2", "g7.5"), start=1):
        place = tmp_path / "drawn" / guidance
        place.mkdir(parents=True)
        save_png(
            place / "000-00.png", np.zeros((9, 9, 3), np.uint8), {"ppldm": json.dumps({"prompt": "a", "n": number})}
        )
    with pytest.raises(DataError, match="holds folders of drawn pictures: name one, such as .*g2"):
        open_pictures(tmp_path)
    assert len(open_pictures(tmp_path / "drawn/g2")) == 1
    save_png(tmp_path / "000-00.png", np.zeros((9, 9, 3), np.uint8), {SETTINGS_CHUNK: json.dumps({"prompt": "a"})})
    assert open_pictures(tmp_path).ids == ["000-00.png"]
    (tmp_path / "000-00.png").unlink()
    shutil.rmtree(tmp_path / "drawn")
    (tmp_path / "x.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="no picture that can be read .image: 1."):
        open_pictures(tmp_path)
