"""What a folder of pictures holds: captions come from the first place that has them for most pictures, and what cannot
be trained on is refused in a line that says what to do."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.formats.folder import list_pictures
from ppldm.data.text.survey import Survey, caption_of_name, has_captions_beside, survey
from ppldm.data.text.vocabulary import languages_of, learn_tokenizer, length_of
from ppldm.utils.errors import ConfigError, DataError

NAMES = ("a_red_car_01", "b/blue house (2)", "IMG_1234")
CAPTIONS = ("one, a red car", "two", "three 三")


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one of a subfolder, one of a name that says nothing."""
    for number, name in enumerate(NAMES):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (70 + number, 64), (number * 90, 0, 0)).save(path)
    return tmp_path / "pictures"


def found(folder) -> tuple[str, dict[str, str]]:
    """(the way that was taken, captions by the pictures' names)."""
    seen = survey(folder)
    return seen.way, {str(path.relative_to(folder))[:-4]: caption for path, caption in seen.captions.items()}


@pytest.mark.parametrize("mark", ["pictures.jsonl", "run.json", ".done/plan.json", ".done/data.json"])
@pytest.mark.parametrize("place", ["drawn", "b/deep/drawn"])
def test_what_ppldm_has_drawn_below_is_left_out(folder, mark, place):
    before = survey(folder)
    inner = folder / place / "g3"
    inner.mkdir(parents=True)
    for path in (inner / "000-00.png", inner.parent / "a_grid.png"):
        Image.new("RGB", (64, 64)).save(path)
    assert len(survey(folder).files) == len(before.files) + 2
    (inner.parent / mark).parent.mkdir(exist_ok=True)
    (inner.parent / mark).touch()
    assert survey(folder) == before
    assert len(list_pictures(folder)) == len(before.captions) + len(before.without) + 2  # others leave nothing out


def write_table(folder, name: str) -> None:
    rows = [
        {"file_name": f"{name}.png", "text": caption, "n": 1} for name, caption in zip(NAMES, CAPTIONS, strict=True)
    ]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    elif name.endswith(".jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        tab = "\t" if name.endswith(".tsv") else ","
        lines = [tab.join(["file_name", "text"]), *(f'{row["file_name"]}{tab}"{row["text"]}"' for row in rows)]
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("table", ["metadata.csv", "captions.tsv", "metadata.jsonl", "all.parquet"])
def test_a_table_comes_first_whatever_its_kind(folder, table):
    write_table(folder, table)
    for name in NAMES:
        (folder / f"{name}.txt").write_text("beside")
    assert found(folder) == ("table", dict(zip(NAMES, CAPTIONS, strict=True)))


def test_a_table_may_lack_a_header_suffixes_and_folders(folder):
    (folder / "list.csv").write_text("a_red_car_01.png,a car, red\nblue house (2).png,a house\n")
    assert found(folder) == ("table", {NAMES[0]: "a car, red", NAMES[1]: "a house"})
    (folder / "list.csv").write_text("image,description\na_red_car_01,car\nIMG_1234,thing\n")
    assert found(folder) == ("table", {NAMES[0]: "car", NAMES[2]: "thing"})


@pytest.mark.parametrize("header", ["文件,描述", "photo,what it shows", "caption,photo"])
def test_of_two_columns_of_any_names_one_names_pictures(folder, header):
    step = -1 if header.startswith("caption") else 1
    rows = [(f"{name}.png", f"thing {number}")[::step] for number, name in enumerate(NAMES)]
    (folder / "captions.csv").write_text("\n".join([header, *map(",".join, rows)]))
    assert found(folder) == ("table", {name: f"thing {number}" for number, name in enumerate(NAMES)})


def test_a_name_that_two_pictures_have_names_neither(folder):
    Image.new("RGB", (64, 64)).save(folder / "b/IMG_1234.png")
    (folder / "list.csv").write_text(
        "IMG_1234.png,at the root\nb/IMG_1234.png,below\nIMG_1234,either\na_red_car_01,car\n"
    )
    assert found(folder)[1] == {"IMG_1234": "at the root", "b/IMG_1234": "below", "a_red_car_01": "car"}


def test_a_table_of_other_things_is_passed_over(folder):
    (folder / "prices.csv").write_text("image,text\nnowhere.png,gone\n")
    (folder / "odd.tsv").write_text("a\tb\n1\t2\n")
    (folder / "one.csv").write_text("a_red_car_01.png,one of three\n")
    assert found(folder)[0] == "names"


def test_files_beside_pictures_come_before_names(folder):
    (folder / f"{NAMES[0]}.txt").write_text(" one\n line ")
    (folder / f"{NAMES[1]}.json").write_text('{"caption": "two"}')
    assert found(folder) == ("files", {NAMES[0]: "one line", NAMES[1]: "two"})
    assert [path.name for path in survey(folder).without] == ["IMG_1234.png"]


def test_a_file_beside_a_picture_comes_before_its_name_where_others_have_none(folder):
    assert not has_captions_beside([folder])
    (folder / "IMG_1234.txt").write_text("three")
    assert found(folder) == ("mixed", dict(zip(NAMES, ("a red car", "blue house", "three"), strict=True)))
    assert "files beside some pictures, and the names" in survey(folder).describe()[0]
    assert folder / "IMG_1234.txt" in survey(folder).files
    assert has_captions_beside([folder]) and not has_captions_beside([folder, folder / "b"])


def test_names_are_captions_and_folders_stand_for_names_that_say_nothing(folder):
    (folder / "IMG_1234.png").rename(folder / "b/IMG_1234.png")
    (folder / "b").rename(folder / "green_things")
    assert found(folder) == ("names", {
        "a_red_car_01": "a red car",
        "green_things/blue house (2)": "blue house",
        "green_things/IMG_1234": "green things",
    })  # fmt: skip


@pytest.mark.parametrize(("name", "caption"), [
    ("red_car_03", "red car"), ("Red-Car 2", "Red Car"), ("红色汽车_01", "红色汽车"), ("car12", "car"),
    ("dog's toy", "dog's toy"),
    ("IMG_1234", ""), ("DSC00042", ""), ("P1010001", ""), ("20230101_120000", ""), ("IMG-20230101-WA0001", ""),
    ("0001", ""),
    ("photo-1518791841217-8f162f1e1131", ""), ("Screenshot from 2024-01-01 10-11-12", ""), ("图片1", ""), ("x", ""),
    ("3f2a9c1b7d", ""), ("beach IMG_2031", "beach IMG"),
])  # fmt: skip
def test_a_caption_of_a_name_is_its_words(name, caption):
    assert caption_of_name(name) == caption


def test_sizes_and_numbers_are_chosen_by_what_is_there(folder):
    assert survey(folder).resolution == 64 and survey(folder).num_updates == 1400
    Image.new("RGB", (70, 50)).save(folder / "a_red_car_01.png")
    assert survey(folder).resolution == 48


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from("abcd"), min_size=1, unique=True),
    st.lists(st.sampled_from("wxyz"), min_size=1, unique=True),
)
def test_prompts_show_every_thing_and_every_colour_where_there_is_room(colours, things):
    captions = {Path(f"{c}{t}"): f"{c} {t}" for t in things for c in colours}
    prompts = Survey(Path(), "names", None, captions, (), (), {}).prompts(max(len(colours), len(things)))
    assert len(set(prompts)) == len(prompts) == max(len(colours), len(things))
    assert {word for prompt in prompts for word in prompt.split()} == {*colours, *things}


@pytest.mark.parametrize("count", [1, 2, 6])
def test_prompts_are_captions_each_once(count):
    texts = ["a red cat", "a red cat", "一只红色的猫", "a dog"]
    captions = {Path(str(number)): text for number, text in enumerate(texts)}
    prompts = Survey(Path(), "names", None, captions, (), (), {}).prompts(count)
    assert {*prompts} <= {*texts} and len(prompts) == len({*prompts}) == min(count, 3)


def test_the_table_that_is_written_is_read_as_it_was(folder, tmp_path):
    write_table(folder, "metadata.csv")
    first = survey(folder)
    (folder / "metadata.csv").write_text(first.table_text())
    assert survey(folder).captions == first.captions


def test_a_tokenizer_of_captions_knows_their_words_in_their_length():
    captions = ["a red car on the road", "一辆红色的汽车"]
    tokenizer = learn_tokenizer(captions)
    assert not tokenizer.unknown_words(captions) and tokenizer.max_length == length_of(captions) == 16
    assert (languages_of(captions), languages_of(captions[:1])) == (["en", "zh"], ["en"])
    assert length_of(["word " * 20]) == 32 and length_of(["word " * 500]) == 77


def refusal(folder) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        survey(folder).resolution  # noqa: B018
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_trained_on_is_refused_with_the_remedy(folder, tmp_path):
    assert "nowhere is not there; name a folder" in refusal(tmp_path / "nowhere")
    assert "cannot be read (Not a directory); name a folder" in refusal(folder / "IMG_1234.png")
    for name in NAMES[:2]:
        (folder / f"{name}.png").rename(folder / f"DSC{len(name)}.png")
    assert "DSC12.png say nothing; write one into DSC12.txt, or all into metadata.csv" in refusal(folder)
    (folder / "DSC12.txt").write_text("a cat")
    assert "DSC16.png say nothing; write one into DSC16.txt" in refusal(folder)
    (folder / "list.csv").write_text("what,it,shows\nDSC12.png,1,2\n")
    assert f"each line of {folder}/list.csv should have a picture and its caption, and the first one" in refusal(folder)
    (folder / "list.csv").unlink()
    for path in folder.glob("DSC*"):
        path.unlink()
    assert "holds only IMG_1234.png" in refusal(folder)
    (folder / "IMG_1234.png").unlink()
    assert "holds no pictures (jpg" in refusal(folder)
    for number in range(2):
        (folder / f"{number}.heic").touch()
    assert "0.heic is of a kind that is not read, save it as JPEG" in refusal(folder)
    (folder / "0.tar").touch()
    assert f"holds no pictures but 0.tar; make parts by `ppldm convert {folder} --out DIR`" in refusal(folder)


def test_a_table_one_folder_up_is_named_where_it_has_the_captions(folder):
    for number, name in enumerate(NAMES):
        (folder / f"{name}.png").rename(folder / f"IMG_{number}.png")
    (folder.parent / "other.csv").write_text("name,price\nbread,2\n")
    assert "write one into IMG_0.txt" in refusal(folder)
    lines = [f"IMG_{number}.png,{caption.replace(',', '')}" for number, caption in enumerate(CAPTIONS)]
    (folder.parent / "captions.csv").write_text("\n".join(["file,text", *lines]) + "\n")
    assert f"{folder.parent}/captions.csv names them: give --pictures {folder.parent}" in refusal(folder)
    assert survey(folder.parent).way == "table"


def test_pictures_that_are_damaged_or_tiny_are_refused(folder):
    for name in NAMES[:2]:
        (folder / f"{name}.png").write_bytes(b"no picture")
    assert "a_red_car_01.png and 1 more of 3 pictures cannot be read" in refusal(folder)
    for name in NAMES:
        Image.new("RGB", (9, 9)).save(folder / f"{name}.png")
    assert "a side under 32 pixels" in refusal(folder)


def test_a_damaged_picture_is_named_and_is_no_example(folder):
    (folder / f"{NAMES[0]}.png").write_bytes(b"no picture")
    told = "\n".join(survey(folder).describe())
    assert f"damaged, of {len(NAMES)} looked at: 1 picture left out, such as {folder}/{NAMES[0]}.png" in told
    assert f"  {NAMES[0]}.png:" not in told and f"  {NAMES[1]}.png:" in told


def test_what_a_table_names_and_is_not_there_is_said(folder):
    """And a damaged picture without a caption is counted once."""
    (folder / "broken.png").write_bytes(b"no picture")
    lines = [f"{name}.png,{caption}" for name, caption in zip(["gone", *NAMES[1:]], ["a", "b", "c"], strict=True)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *lines]) + "\n")
    told = "\n".join(survey(folder).describe())
    assert "named in metadata.csv, and not there: 1, such as gone.png" in told
    assert f"no caption: 1 picture left out, such as {folder}/{NAMES[0]}.png" in told and told.count("broken") == 1


def test_a_name_that_two_pictures_have_is_not_called_lost(folder):
    for place in ("x", "y"):
        (folder / place).mkdir()
        Image.new("RGB", (64, 64)).save(folder / place / "twice.png")
    lines = [f"{name},{caption}" for name, caption in [("twice.png", "a"), ("gone.png", "b")]]
    lines += [f"{name}.png,{caption}" for name, caption in zip(NAMES, "cde", strict=True)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *lines]) + "\n")
    assert survey(folder).lost == ("gone.png",)


def test_a_damaged_table_is_named(folder):
    (folder / "metadata.parquet").write_bytes(b"PAR1 no table")
    assert "cannot read the table" in refusal(folder) and "metadata.parquet" in refusal(folder)
