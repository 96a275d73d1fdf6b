"""Law: the same rows come out of every kind of source, through both readers, complete or with a named reason."""

import csv
import io
import json
import random
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import formats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forking import forking, kill_group_when
from PIL import Image

from ppldm.data.filelist import read_sources
from ppldm.data.formats.part import Part
from ppldm.data.formats.row import Row
from ppldm.data.images import decode_pixels
from ppldm.prepare.convert.convert import Conversion, convert_source
from ppldm.prepare.convert.reencode import Treatment, treat
from ppldm.prepare.convert.units import find_units
from ppldm.utils.errors import ConfigError, DataError, RowError

NUM_ROWS = 11
SHARD_ROWS = 4


def picture(seed: int, size=(12, 9), image_format="JPEG", **options) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, image_format, **options)
    return file.getvalue()


def meta_of(row: int) -> dict:
    """As img2dataset writes it beside a picture."""
    return {
        "url": f"http://x/{row}.jpg",
        "caption": caption_of(row),
        "key": f"{row:09}",
        "status": "success",
        "error_message": None,
        "width": 12,
        "height": 9,
        "original_width": 1200,
        "original_height": 900,
        "exif": "{}",
        "sha256": "0" * 64,
        "similarity": 0.5,
        "AESTHETIC_SCORE": 6.5,
    }


def caption_of(row: int) -> str:
    return f'a "picture", number {row}; 心'


ROWS = [(caption_of(row), picture(row), meta_of(row)) for row in range(NUM_ROWS)]
SHARDS = [ROWS[start : start + SHARD_ROWS] for start in range(0, NUM_ROWS, SHARD_ROWS)]


def add(tar, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_files(folder):
    for number, rows in enumerate(SHARDS):
        shard = folder / f"{number:05}"
        shard.mkdir(parents=True)
        for caption, image, meta in rows:
            (shard / f"{meta['key']}.jpg").write_bytes(image)
            (shard / f"{meta['key']}.txt").write_text(caption)
            (shard / f"{meta['key']}.json").write_text(json.dumps(meta))
        write_metadata(folder, number, rows)
    return folder


def write_metadata(folder, number: int, rows) -> None:
    """What img2dataset leaves beside a shard."""
    pq.write_table(pa.Table.from_pylist([meta for *_, meta in rows]), folder / f"{number:05}.parquet")
    (folder / f"{number:05}_stats.json").write_text("{}")


def write_webdataset(folder):
    folder.mkdir()
    for number, rows in enumerate(SHARDS):
        with tarfile.open(folder / f"{number:05}.tar", "w") as tar:
            for caption, image, meta in rows:
                add(tar, f"{meta['key']}.json", json.dumps(meta).encode())
                add(tar, f"{meta['key']}.jpg", image)
                add(tar, f"{meta['key']}.txt", caption.encode())
        write_metadata(folder, number, rows)
    return folder


def write_parquet(folder):
    folder.mkdir()
    for number, rows in enumerate(SHARDS):
        table = pa.Table.from_pylist([{"jpg": image, "txt": caption, **meta} for caption, image, meta in rows])
        pq.write_table(table, folder / f"{number:05}.parquet", row_group_size=3)
    return folder


def write_shards(folder):
    def text(value) -> bytes:
        return str(value).encode()

    columns = {
        "AESTHETIC_SCORE": ("float64", 8, lambda row: np.float64(row.meta["AESTHETIC_SCORE"]).tobytes()),
        "caption": ("str", None, lambda row: row.caption.encode()),
        "jpg": ("jpeg", None, lambda row: row.image),
        "key": ("str", None, lambda row: row.meta["key"].encode()),
        "original_height": ("int32", 4, lambda row: np.int32(row.meta["original_height"]).tobytes()),
        "original_width": ("str_int", None, lambda row: text(row.meta["original_width"])),
        "similarity": ("str_float", None, lambda row: text(row.meta["similarity"])),
        "url": ("str", None, lambda row: row.meta["url"].encode()),
        "vector": ("bytes", None, lambda row: b"x" * len(row.caption)),
    }
    folder.mkdir()
    for number, rows in enumerate(SHARDS):
        formats.write_mds(folder / f"shard.{number:05}.mds", [Row(*row) for row in rows], columns)
    (folder / "index.json").write_text("{}")
    return folder


def write_packed_shards(folder):
    for path in write_shards(folder).glob("*.mds"):
        formats.pack_mds(path, ".zstd")
    return folder


def write_csv(folder):
    """`ppldm annotate`'s table beside the pictures."""
    write_files(folder / "part_1")
    for path in (folder / "part_1").rglob("*.txt"):
        path.unlink()
    with open(folder / "part_1.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dir", "text", "url", "similarity", "original_width", "original_height", "AESTHETIC_SCORE"])
        for row, (caption, _, meta) in enumerate(ROWS):
            name = f"part_1/{row // SHARD_ROWS:05}/{meta['key']}.jpg"
            writer.writerow([name, caption, meta["url"], 0.5, 1200, 900, 6.5])
    return folder / "part_1.csv"


def write_lines(folder, name="rows.jsonl"):
    folder.mkdir()
    with open(folder / name, "w") as file:
        for caption, image, meta in ROWS:
            (folder / f"{meta['key']}.jpg").write_bytes(image)
            file.write(json.dumps({"file_name": f"{meta['key']}.jpg", "text": caption, **meta}) + "\n\n")
    return folder / name


def write_imagefolder(folder):
    return write_lines(folder, "metadata.jsonl").parent


WRITERS = {
    "files": (write_files, 5),
    "webdataset": (write_webdataset, 5),
    "parquet": (write_parquet, 5),
    "mds": (write_shards, 5),
    "packed mds": (write_packed_shards, 5),
    "csv": (write_csv, 4),
    "jsonl": (write_lines, 4),
    "imagefolder": (write_imagefolder, 4),
}


def run(source, out, **options):
    return convert_source(source, out, **{"num_workers": 1, "rows_per_part": 3} | options)


def read_all(out, manifest):
    parts = [Part(out / part["path"]) for part in manifest["parts"]]
    return [part.read(row) for part in parts for row in range(len(part))]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_rows_come_out_of_every_kind_of_source(tmp_path, kind):
    write, num_parts = WRITERS[kind]
    source, out = write(tmp_path / "in"), tmp_path / "out"
    manifest = run(source, out)
    rows = read_all(out, manifest)
    assert [(row.caption, row.image) for row in rows] == [(caption, image) for caption, image, _ in ROWS]
    for number, row in enumerate(rows):
        said = {key: row.meta[key] for key in ("key", "url", "similarity", "aesthetic", "original_width", "width")}
        assert said == {
            "key": f"{number:09}",
            "url": f"http://x/{number}.jpg",
            "similarity": 0.5,
            "aesthetic": 6.5,
            "original_width": 1200,
            "width": 12,
        }
        assert not {"caption", "status", "exif", "error_message", "URL", "AESTHETIC_SCORE"} & row.meta.keys()
    assert manifest["rows_in"] == NUM_ROWS == manifest["rows_out"] and len(manifest["parts"]) == num_parts
    before = {path: path.stat().st_ino for path in (out / "parts").iterdir()}
    assert run(source, out) == manifest
    assert {path: path.stat().st_ino for path in (out / "parts").iterdir()} == before
    assert {path.name for path in source.rglob("*.idx")} == set() if source.is_dir() else True


@pytest.mark.parametrize("way", ["table", "names"])
def test_captions_in_a_table_or_in_names_are_taken_as_training_takes_them(tmp_path, monkeypatch, caplog, way):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    folder, out = tmp_path / "in", tmp_path / "in/out"
    names = "a_red_car_1", "below/blue_house_2", "below/IMG_3", "drawn/a_green_tree"
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jpg").write_bytes(picture(number))
    (folder / "drawn/pictures.jsonl").write_text("{}\n")  # a drawing of ppldm's
    if way == "table":
        (folder / "list.tsv").write_text("".join(f"{name}.jpg\tcaption of {name}\n" for name in names))
    captions = [f"caption of {name}" for name in names[:3]] if way == "table" else ["a red car", "blue house", "below"]
    assert Conversion(folder, out, num_workers=1).plan()["rows_in"] == 3 and not out.exists()
    manifest = run(folder, out, rows_per_part=2)
    assert sorted((row.caption, row.image) for row in read_all(out, manifest)) == sorted(
        zip(captions, map(picture, range(3)), strict=True)
    )
    assert [unit.path for unit in find_units(folder)] == [part for one in read_sources(folder) for part in one.parts]
    assert {part["source"] for part in manifest["parts"]} == {"."} and "not read beside" not in caplog.text
    before = {path: path.stat().st_ino for path in (out / "parts").iterdir()}
    assert run(folder, out, rows_per_part=2) == manifest
    assert {path: path.stat().st_ino for path in (out / "parts").iterdir()} == before
    if way == "table":
        (folder / "list.tsv").write_text((folder / "list.tsv").read_text().replace("of a_red", "of no"))
    else:
        (folder / "a_red_car_1.jpg").rename(folder / "a_car.jpg")
    changed = {row.caption for row in read_all(out, run(folder, out, rows_per_part=2))}
    assert changed == {"caption of no_car_1" if way == "table" else "a car", *captions[1:]}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("rows_per_part", [1, 4, 100])
def test_spans_cover_every_row_once(tmp_path, kind, rows_per_part):
    keys = []
    for unit in find_units(WRITERS[kind][0](tmp_path / "in")):
        for span in unit.spans(rows_per_part):
            rows = list(unit.read(span))
            assert len(rows) == span.rows <= rows_per_part
            keys += [key for key, _ in rows]
    assert keys == [f"{row:09}" for row in range(NUM_ROWS)]


def test_the_parts_of_a_packed_shard_depend_on_all_of_its_file(tmp_path):
    unit = find_units(write_packed_shards(tmp_path / "in"))[0]
    for span in unit.spans(1):
        (piece,) = unit.input_pieces(span)
        assert (piece.path, piece.start, piece.stop) == (unit.path, 0, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webdataset", "csv"])
def test_the_output_does_not_depend_on_workers_or_spark(tmp_path, kind):
    source = WRITERS[kind][0](tmp_path / "in")
    outputs = []
    for name, options in (("one", {}), ("two", {"num_workers": 2}), ("spark", {"master": "local[2]"})):
        run(source, tmp_path / name, **options)
        outputs.append(contents(tmp_path / name))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_damaged_tar_gives_the_rows_before_the_damage_and_one_bad_row(tmp_path):
    folder = write_webdataset(tmp_path / "in")
    data = (folder / "00001.tar").read_bytes()
    (folder / "00001.tar").write_bytes(data[: len(data) // 2])
    manifest = run(folder, tmp_path / "out")
    assert manifest["skipped"].keys() == {"tar"} and "00001.tar" in manifest["examples"]["tar"][0]
    assert manifest["rows_in"] == manifest["rows_out"] + manifest["skipped"]["tar"]
    captions = [row.caption for row in read_all(tmp_path / "out", manifest)]
    assert captions[:4] == [caption_of(row) for row in range(4)] and captions[-3:] == [
        caption_of(r) for r in (8, 9, 10)
    ]
    (folder / "00002.tar").write_bytes(b"no tar at all")
    assert run(folder, tmp_path / "out2")["skipped"] == {"tar": manifest["skipped"]["tar"] + 1}


def test_a_tar_that_is_damaged_where_a_span_ends_has_no_span_too_long(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for row in range(4):
            add(tar, f"{row}.jpg", bytes(600))
    data = path.read_bytes()
    path.write_bytes(data[: 4 * 1536] + b"garbage" * 1000)
    (unit,) = find_units(path)
    spans = unit.spans(2)
    assert [span.rows for span in spans] == [2, 2, 1]
    rows = [row for span in spans for row in unit.read(span)]
    assert [key for key, _ in rows] == ["0", "1", "2", "3", "x.tar"]
    assert isinstance(rows[-1][1], RowError) and "damaged" in str(rows[-1][1])


def test_rows_of_tables_that_cannot_be_used_are_counted_by_reason(tmp_path):
    folder = write_lines(tmp_path / "in").parent
    bad = [
        '{"file_name": "nowhere.jpg", "text": "x"}',
        '{"text": "x"}',
        '{"file_name": "000000001.jpg"}',
        '{"file_name": "000000001.jpg", "text": " "}',
        "{",
        "[1]",
    ]
    with open(folder / "rows.jsonl", "a") as file:
        file.write("\n".join(bad))
    manifest = run(folder / "rows.jsonl", tmp_path / "out")
    reasons = {"empty_caption": 1, "metadata": 2, "no_caption": 1, "no_image": 1, "unreadable": 1}
    assert manifest["skipped"] == reasons and manifest["rows_out"] == NUM_ROWS
    table = write_csv(tmp_path / "csv")
    with open(table, "a") as file:
        file.write("part_1/nowhere.jpg,x,,,,,\n" + '"two\nlines.jpg",x\n')
    assert run(table, tmp_path / "out2")["skipped"] == {"columns": 1, "unreadable": 1}


def test_rows_of_parquet_without_a_picture_say_why(tmp_path):
    folder = write_parquet(tmp_path / "in")
    rows = pq.read_table(folder / "00000.parquet").to_pylist()
    rows[1] |= {"jpg": None, "txt": None, "status": "failed_to_download", "error_message": "HTTP Error 404: Not Found"}
    pq.write_table(pa.Table.from_pylist(rows), folder / "00000.parquet")
    manifest = run(folder, tmp_path / "out")
    assert manifest["skipped"] == {"not_downloaded": 1} and "404" in manifest["examples"]["not_downloaded"][0]


def test_a_changed_picture_of_a_table_changes_its_part(tmp_path):
    folder = write_imagefolder(tmp_path / "in")
    run(folder, tmp_path / "out")
    (folder / "000000004.jpg").write_bytes(picture(99, (20, 9)))
    manifest = run(folder, tmp_path / "out")
    assert read_all(tmp_path / "out", manifest)[4].image == picture(99, (20, 9))


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
def test_pictures_that_the_table_of_a_folder_does_not_name_are_told(tmp_path, caplog, table):
    names = [tmp_path / "in" / name for name in ("a.png", "b.png", "below/c.png", "below/d.png")]
    for name in names:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(picture(1, (8, 8)))
    said = [{"file_name": "./a.png", "text": "a"}, {"file_name": "below/c.png", "text": "c"}]
    lines = ["file_name,text", "./a.png,a", "below/c.png,c", "too,many,fields"]
    if table.endswith("l"):
        lines = [*map(json.dumps, said), '{"a line": "that breaks off']
    (tmp_path / "in" / table).write_text("\n".join(lines))
    assert run(tmp_path / "in", tmp_path / "out")["rows_out"] == 2
    said = f"{tmp_path / 'in' / table}: no line for 2 picture(s) such as {tmp_path / 'in/b.png'}"
    assert said in caplog.text
    caplog.clear()
    (tmp_path / "in/b.png").unlink()
    (tmp_path / "in/below/d.png").unlink()
    run(tmp_path / "in", tmp_path / "again")
    assert "no line" not in caplog.text


def test_sources_that_give_nothing_are_named_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images in"):
        find_units(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        find_units(tmp_path / "nowhere")
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a known source"):
        find_units(tmp_path / "x.zip")
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="it needs one of file_name, dir, path"):
        run(tmp_path / "t.csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("size", "treatment", "shape", "image_format"),
    [
        ((40, 30), {"size": 15}, (20, 15), "JPEG"),
        ((30, 41), {"size": 15}, (15, 20), "JPEG"),
        ((40, 30), {"size": 30}, None, "JPEG"),
        ((40, 30), {"size": 100}, None, "JPEG"),
        ((40, 30), {"format": "jpg"}, None, "JPEG"),
        ((40, 30), {"format": "webp"}, (40, 30), "WEBP"),
        ((40, 30), {"format": "png", "size": 10}, (13, 10), "PNG"),
        ((40, 30), {"quality": 50}, (40, 30), "JPEG"),
    ],
)
def test_pictures_are_treated_only_where_that_was_asked_for(size, treatment, shape, image_format):
    image = picture(1, size)
    out, width, height = treat(image, decode_pixels(image), Treatment(**treatment))
    if shape is None:
        assert out == image and (width, height) == size
        return
    with Image.open(io.BytesIO(out)) as opened:
        assert (width, height) == opened.size == shape and opened.format == image_format
    expected = Image.open(io.BytesIO(image)).convert("RGB").resize(shape, Image.Resampling.LANCZOS)
    difference = np.abs(np.asarray(expected).astype(int) - decode_pixels(out)).mean()
    assert difference == 0 if image_format == "PNG" else difference < 40


def test_rotation_and_transparency_are_applied_to_what_is_encoded_anew(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(1, (40, 30), exif=exif)
    out, width, height = treat(turned, decode_pixels(turned), Treatment(size=15, format="png"))
    assert (width, height) == (15, 20)
    clear = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(clear, "PNG")
    out, *_ = treat(clear.getvalue(), decode_pixels(clear.getvalue()), Treatment(format="jpg"))
    assert decode_pixels(out).min() == 255


def test_small_pictures_are_refused_where_that_was_asked_for():
    image = picture(1, (40, 30))
    with pytest.raises(RowError) as raised:
        treat(image, decode_pixels(image), Treatment(min_size=31))
    assert raised.value.reason == "too_small"
    for bad in ({"format": "gif"}, {"quality": 101}, {"size": -1}, {"min_size": -1}):
        with pytest.raises(ConfigError):
            Treatment(**bad)


def test_original_sizes_are_those_before_shrinking(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(picture(1, (40, 30)))
    (folder / "a.txt").write_text("a")
    manifest = run(folder, tmp_path / "out", treatment=Treatment(size=15))
    (row,) = read_all(tmp_path / "out", manifest)
    assert [row.meta[k] for k in ("width", "height", "original_width", "original_height")] == [20, 15, 40, 30]
    with pytest.raises(ConfigError, match="another conversion"):
        run(folder, tmp_path / "out")


@pytest.mark.slow
def test_killed_at_any_point_the_same_command_gives_the_same_bytes(tmp_path):
    source = write_webdataset(tmp_path / "in")
    run(source, tmp_path / "whole", rows_per_part=1)
    rng = random.Random(0)
    # Points are calls into the system that change the folder; the process dies before one of them.
    with forking(KILLED, tmp_path / "log", source) as start:
        for number in range(20):
            out = tmp_path / f"killed{number}"
            status = start(f"{rng.randrange(110)} {out}")[1]()
            assert status in (0, signal.SIGKILL)
            assert status == 0 or not (out / "manifest.json").exists()
            run(source, out, rows_per_part=1)
            assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [0, 1, 5, 12, 25])
def test_killed_from_outside_with_all_its_workers_the_same_command_gives_the_same_bytes(tmp_path, wanted):
    """SIGKILL to the whole group of processes once `wanted` parts are finished, at a moment that nobody chose."""
    source = tmp_path / "in"
    source.mkdir()
    for row in range(400):
        (source / f"{row:04}.jpg").write_bytes(picture(row, (160, 120)))
        (source / f"{row:04}.txt").write_text(f"row {row}")
    options = {"rows_per_part": 10, "treatment": Treatment(size=100)}
    run(source, tmp_path / "whole", **options)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "ppldm", "convert", source, "--out", out, "--rows-per-part", "10", "--size", "100"]
    with subprocess.Popen(
        [*command, "--num-workers", "3"],
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert kill_group_when(process, lambda: (out / "parts").exists() and count_parts(out) >= wanted)
    finished = {path.name: path.stat().st_ino for path in (out / "parts").glob("part-*.gz")}
    recorded = {path.stem for path in (out / ".convert").glob("part-*.json")}
    assert wanted <= len(recorded) < len(contents(tmp_path / "whole"))
    run(source, out, **options)
    assert contents(out) == contents(tmp_path / "whole")
    now = {path.name: path.stat().st_ino for path in (out / "parts").glob("part-*.gz")}
    assert all(now[name] == finished[name] for name in recorded)  # nothing is done twice


def count_parts(out) -> int:
    return len(list((out / ".convert").glob("part-*.json")))


KILLED = """
import signal
from pathlib import Path
from ppldm.prepare.convert.convert import convert_source
left = 0
def dying(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
def go(line):
    global left
    left, out = line.split(" ", 1)
    left = int(left)
    for name in ("replace", "fsync", "unlink", "chmod"):
        setattr(os, name, dying(getattr(os, name)))
    convert_source(Path(sys.argv[1]), Path(out), num_workers=1, rows_per_part=1)
"""


def contents(out) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and ".convert" not in path.parts)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}
