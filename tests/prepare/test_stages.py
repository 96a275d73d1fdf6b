"""Law: after any change of content, order or number of what a stage was made from, or of a setting, its command refuses
or gives what a fresh one gives; by settings it refuses, and `--redo` makes again."""

import io
import json
import os
import shutil
import tarfile
from base64 import b64encode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from PIL import Image

from ppldm.data.filelist import read_sources
from ppldm.data.formats.part import Part
from ppldm.demo import openmoji
from ppldm.inspect.repack import repack
from ppldm.prepare.convert.annotate import annotate
from ppldm.prepare.convert.convert import convert
from ppldm.prepare.convert.reencode import Resizer
from ppldm.prepare.download.download import download, download_parts
from ppldm.prepare.download.part import PartDownload, find_columns, find_parts, find_removed
from ppldm.prepare.filter.filter import filter
from ppldm.prepare.pipeline import pipeline
from ppldm.utils.errors import ConfigError, OutputError

REFUSED = (ConfigError, OutputError)
NUM_ROWS = 4


def picture(seed) -> bytes:
    buffer = io.BytesIO()
    pixels = np.full((8, 8, 3), seed * 9, np.uint8)
    Image.fromarray(pixels).save(buffer, "BMP")  # of one size, whatever it shows
    buffer.seek(0)
    out = io.BytesIO()
    Image.open(buffer).save(out, "PNG", compress_level=0)
    return out.getvalue()


class Stage:
    """One kind of input and its command. Rows are numbers: `write` makes the input of a list of them."""

    setting: dict
    refuses_content = False
    makes_settings = False  # without --redo

    def __init__(self, folder):
        self.folder = folder

    def read(self, out):
        """The result, without what tells of times and of records."""
        hidden = lambda path: any(part.startswith(".") for part in path.relative_to(out).parts)  # noqa: E731
        files = (path for path in out.rglob("*") if path.is_file() and not hidden(path))
        return {str(path.relative_to(out)): path.read_bytes() for path in files}


class Filter(Stage):
    setting = {"max_width": 602}

    def write(self, rows):
        folder = self.folder / "tables"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number in range(0, len(rows), 2):
            own = rows[number : number + 2]
            columns = {
                "URL": [f"http://x/{row}" for row in own],
                "TEXT": ["t"] * len(own),
                "WIDTH": [600 + row for row in own],
            }
            pq.write_table(pa.table(columns), folder / f"part_{number}.parquet")

    def run(self, out, **flags):
        filter(input=[str(self.folder / "tables")], output=str(out), no_shuffle=True, **flags)

    def read(self, out):
        return [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


class Convert(Stage):
    setting = {"rows_per_part": 2}

    def write(self, rows):
        folder = self.folder / "in"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.fill(folder, [(f"{place:04}", f"row {row}", picture(row)) for place, row in enumerate(rows)])

    def run(self, out, **flags):
        convert(str(self.folder / "in"), str(out), num_workers=1, **{"rows_per_part": 3} | flags)

    def fill(self, folder, rows):
        for key, text, image in rows:
            (folder / f"{key}.png").write_bytes(image)
            (folder / f"{key}.txt").write_text(text)


class ConvertSize(Convert):
    setting = {"size": 4}

    def run(self, out, **flags):
        super().run(out, **{"size": 8} | flags)


class ConvertName(Convert):
    setting = {"name": "other"}


class ConvertTar(Convert):
    def fill(self, folder, rows):
        with tarfile.open(folder / "0.tar", "w") as tar:
            for key, text, image in rows:
                for suffix, data in ((".png", image), (".txt", text.encode())):
                    info = tarfile.TarInfo(key + suffix)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


class ConvertParquet(Convert):
    def fill(self, folder, rows):
        keys, texts, images = zip(*rows, strict=True)
        table = pa.table({"key": keys, "text": texts, "image": images})
        pq.write_table(table, folder / "0.parquet", row_group_size=2)


class ConvertJsonLines(Convert):
    def fill(self, folder, rows):
        (folder / "p").mkdir()
        lines = []
        for key, text, image in rows:
            (folder / f"p/{key}.png").write_bytes(image)
            lines.append(json.dumps({"file_name": f"p/{key}.png", "text": text}) + "\n")
        (folder / "metadata.jsonl").write_text("".join(lines))


class ConvertCsv(Convert):
    def fill(self, folder, rows):
        (folder / "p").mkdir()
        for key, _, image in rows:
            (folder / f"p/{key}.png").write_bytes(image)
        lines = ["dir,text\n", *(f"p/{key}.png,{text}\n" for key, text, _ in rows)]
        (folder / "part.csv").write_text("".join(lines))

    def run(self, out, **flags):
        convert(str(self.folder / "in/part.csv"), str(out), num_workers=1, **{"rows_per_part": 3} | flags)


class Annotate(Stage):
    """Which makes all its files at every call."""

    setting = {"folder_prefix": "there"}
    makes_settings = True

    def write(self, rows):
        for name in ("out", "fresh"):
            shutil.rmtree(self.folder / name / "part_1", ignore_errors=True)
            (self.folder / name / "part_1/00000").mkdir(parents=True)
            for place, row in enumerate(rows):
                (self.folder / name / f"part_1/00000/{place:09}.jpg").write_bytes(picture(row))
                (self.folder / name / f"part_1/00000/{place:09}.txt").write_text(f"row {row}")

    def run(self, out, redo=False, **flags):
        annotate(str(out), **flags)

    def read(self, out):
        return (out / "part_1.csv").read_text()


class Repack(Stage):
    setting = {"layout": "alt-text2image_gen_filted_data_shuffle_watermark"}
    options = ""

    def write(self, rows):
        for place, row in enumerate(rows):
            first = b64encode(f"caption {row}".encode()).decode()  # a caption, or a picture in the other layout
            (self.folder / f"{place}.gz").write_text(f"{first}\tmore {row}\tQUJD\n")
        (self.folder / "in.filelist").write_text("".join(f"{place}.gz\n" for place in range(len(rows))))
        (self.folder / "in.list").write_text(f"in.filelist {self.options}\n")

    def run(self, out, **flags):
        repack([str(self.folder / "in.list")], str(out), num_workers=1, **flags)

    def read(self, out):
        parts = [path for source in read_sources(out / "repacked.filelist.list") for path in source.parts]
        assert {path.name for path in parts} == {path.name for path in (out / "parts").glob("*.gz")}
        return [Part(path).read(0).caption for path in parts]


class RepackFolder(Repack):
    """Of pictures that a folder, and that a table names; the filelist is asked for by another name."""

    setting = {}
    options = "format=folder"

    def write(self, rows):
        shutil.rmtree(self.folder / "p", ignore_errors=True)
        (self.folder / "p").mkdir()
        Convert.fill(
            self, self.folder / "p", [(f"{place}", f"row {row}", picture(row)) for place, row in enumerate(rows)]
        )
        lines = [f"{place}.png,row\n" for place in range(len(rows))]
        (self.folder / "p/in.csv").write_text("".join(["dir,text\n", *lines]))
        (self.folder / "in.filelist").write_text("p/in.csv\n" if "csv" in self.options else "p\n")
        (self.folder / "in.list").write_text(f"in.filelist {self.options}\n")

    def read(self, out):
        (part,) = [path for source in read_sources(out / "repacked.filelist.list") for path in source.parts]
        part = Part(part)
        return [(row.caption, row.image) for row in map(part.read, range(len(part)))]


class RepackCsv(RepackFolder):
    options = "format=csv"


STAGES = [
    *(Filter, Convert, ConvertSize, ConvertName, ConvertTar, ConvertParquet, ConvertJsonLines, ConvertCsv),
    *(Annotate, Repack, RepackFolder, RepackCsv),
]
CHANGES = {
    "content": [0, 7, 2, 3],
    "order": [1, 0, 2, 3],
    "removal": [0, 1, 2],
    "addition": [0, 1, 2, 3, 4],
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", STAGES)
def test_a_changed_input_gives_what_a_fresh_command_gives(kind, change, tmp_path, capsys):
    stage, out, fresh = kind(tmp_path), tmp_path / "out", tmp_path / "fresh"
    stage.write(range(NUM_ROWS))
    stage.run(out)
    before = stage.read(out)
    stage.write(CHANGES[change])
    for path in tmp_path.rglob("*"):  # times tell nothing
        if path.is_file() and out not in path.parents:
            os.utime(path, (1e9, 1e9))
    stage.run(out)
    stage.run(fresh)
    assert stage.read(out) == stage.read(fresh) != before


@pytest.mark.parametrize("changed", ["text", "picture"])
@pytest.mark.parametrize("kind", [Convert, ConvertTar, ConvertParquet, ConvertJsonLines, ConvertCsv])
def test_a_text_or_a_picture_alone_is_content(kind, changed, tmp_path, capsys):
    stage = kind(tmp_path)
    stage.write(range(NUM_ROWS))
    stage.run(tmp_path / "out")
    before = stage.read(tmp_path / "out")
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "in").mkdir()
    rows = [(f"{row:04}", f"row {row}", picture(row)) for row in range(NUM_ROWS)]
    changes = {"text": ("0001", "rew 1", picture(1)), "picture": ("0001", "row 1", picture(9))}
    stage.fill(tmp_path / "in", [rows[0], changes[changed], *rows[2:]])
    stage.run(tmp_path / "out")
    stage.run(tmp_path / "fresh")
    assert stage.read(tmp_path / "out") == stage.read(tmp_path / "fresh") != before


@pytest.mark.parametrize("kind", [kind for kind in STAGES if kind.setting])
def test_another_setting_is_refused_until_it_is_made_again(kind, tmp_path, capsys):
    stage, out, fresh = kind(tmp_path), tmp_path / "out", tmp_path / "fresh"
    stage.write(range(NUM_ROWS))
    stage.run(out)
    before = stage.read(out)
    if not kind.makes_settings:
        with pytest.raises(
            REFUSED, match=f"{next(iter(kind.setting)).split('_')[-1]}.* was .* and is .*--redo|--redo"
        ) as error:
            stage.run(out, **kind.setting)
        assert "\n" not in str(error.value) and stage.read(out) == before
    stage.run(out, **kind.setting, redo=True)
    stage.run(fresh, **kind.setting)
    assert stage.read(out) == stage.read(fresh) != before


@pytest.mark.parametrize("kind", STAGES)
def test_an_unchanged_input_is_left_alone(kind, tmp_path, capsys):
    stage, out = kind(tmp_path), tmp_path / "out"
    stage.write(range(NUM_ROWS))
    stage.run(out)
    inodes = {path: path.stat().st_ino for path in out.rglob("*") if path.suffix in (".gz", ".parquet")}
    stage.write(range(NUM_ROWS))
    stage.run(out)
    assert inodes == {path: path.stat().st_ino for path in out.rglob("*") if path.suffix in (".gz", ".parquet")}


def test_demo_data_of_other_packages_or_flags(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    openmoji.demo_data(str(out), size=8, limit=3, subset="quickstart")
    captions = (out / "images").iterdir()
    before = {path: path.stat().st_mtime_ns for path in captions}
    version = openmoji.version
    monkeypatch.setattr(openmoji, "version", lambda name: "99" if name == "emoji" else version(name))
    openmoji.demo_data(str(out), size=8, limit=3, subset="quickstart")
    assert not before.items() & {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()}.items()
    with pytest.raises(ConfigError, match="subset was 'quickstart' and is 'all'.*--redo"):
        openmoji.demo_data(str(out), size=8, limit=3)
    openmoji.demo_data(str(out), size=8, limit=3, redo=True)
    openmoji.demo_data(str(tmp_path / "fresh"), size=8, limit=3)
    names = [
        {str(path.relative_to(top)) for path in top.rglob("*") if ".convert" not in path.parts}
        for top in (out, tmp_path / "fresh")
    ]
    assert names[0] == names[1]


# --- downloads, without a network: shards are there by their stats, which is all that the plan looks at.


def metadata_of(folder, rows, number=1):
    folder.mkdir(exist_ok=True)
    urls = [f"http://127.0.0.1:9/{row}.jpg" for row in rows]
    pq.write_table(pa.table({"URL": urls, "TEXT": ["t"] * len(urls)}), folder / f"part_{number}.parquet")


def parts_of(tmp_path, redo=False, **settings):
    from ppldm.prepare.download.fetch import FetchSettings
    from ppldm.prepare.download.shard import ShardSettings

    resizer = Resizer(
        settings.pop("image_size", 64), settings.pop("encode_quality", 95), settings.pop("min_image_size", 0)
    )
    forbidding = settings.pop("disallowed_header_directives", ("noai",))
    options = {"output_format": "files", "number_sample_per_shard": 2} | settings
    fetch = FetchSettings(1, 0, 1, 10, disallowed_header_directives=forbidding)
    shard = ShardSettings(fetch, resizer, columns=(), thread_count=1, shard_seconds=1, **options)
    return [
        PartDownload(part, tmp_path / f"out/part_{part.number}", find_columns(part.path), shard, redo=redo)
        for part in find_parts(tmp_path / "metadata", 0)
    ]


def finish(parts):
    """Mark all shards as downloaded."""
    for item in parts:
        with item.claimed():
            for number in range(item.num_shards):
                (item.folder / f"{number:05}").mkdir()
                (item.folder / f"{number:05}_stats.json").write_text("{}")


@pytest.mark.parametrize(
    "change, settings, words",
    [
        ([0, 7, 2, 3], {}, "other content"),
        ([1, 0, 2, 3], {}, "other content"),
        ([0, 1, 2], {}, "rows was 4 and is 3"),
        (range(NUM_ROWS), {"image_size": 32}, "image_size was 64 and is 32"),
        (range(NUM_ROWS), {"encode_quality": 50}, "encode_quality was 95 and is 50"),
        (range(NUM_ROWS), {"min_image_size": 50}, "min_image_size was 0 and is 50"),
        (range(NUM_ROWS), {"output_format": "parquet"}, "output_format was 'files' and is 'parquet'"),
        (range(NUM_ROWS), {"number_sample_per_shard": 3}, "number_sample_per_shard was 2 and is 3"),
        (range(NUM_ROWS), {"disallowed_header_directives": ()}, "disallowed_header_directives was"),
    ],
)
def test_a_finished_download_of_other_metadata_or_settings_is_refused_and_made_again_by_redo(
    tmp_path, change, settings, words
):
    metadata_of(tmp_path / "metadata", range(NUM_ROWS))
    metadata_of(tmp_path / "metadata", range(NUM_ROWS), 2)
    finish(parts_of(tmp_path))
    parts = parts_of(tmp_path)
    assert [item.count_rows() for item in parts] == [0, 0] and not any(item.is_stale for item in parts)
    metadata_of(tmp_path / "metadata", change)
    with pytest.raises(ConfigError, match=f"part_1 holds another download.*{words}.*--redo"):
        parts_of(tmp_path, **settings)[0].count_rows()
    parts = parts_of(tmp_path, redo=True, **settings)
    stale = [1, 2] if settings else [1]  # the other part's metadata is what it was
    assert [item.part.number for item in parts if item.is_stale] == stale
    assert [item.count_rows() for item in parts] == [len(change), NUM_ROWS if settings else 0]
    assert all(item.finished_shards() for item in parts)  # until the work begins
    for item in parts[: len(stale)]:
        with item.claimed():
            assert not item.finished_shards() and not list(item.folder.glob("0*"))
    assert not any(item.is_stale for item in parts_of(tmp_path, **settings))


def test_a_download_of_an_older_version_is_taken_for_todays(tmp_path, caplog):
    metadata_of(tmp_path / "metadata", range(NUM_ROWS))
    finish(parts_of(tmp_path))
    plan_path = tmp_path / "out/part_1/.download/plan.json"
    old = {"metadata": "part_1.parquet", "rows": 4, "output_format": "files", "number_sample_per_shard": 2}
    old |= {"image_size": 64, "encode_quality": 95, "columns": []}
    plan_path.write_text(json.dumps(old))
    download_parts(parts_of(tmp_path), tmp_path / "out", None, 0, True, lambda task: None)
    assert caplog.text.count("taken for today's") == 1 and "input" in json.loads(plan_path.read_text())
    metadata_of(tmp_path / "metadata", [5, 6, 7, 8])
    with pytest.raises(ConfigError, match="other content"):
        parts_of(tmp_path)[0].count_rows()


def test_a_part_that_the_metadata_has_no_longer_is_not_left_among_the_data(tmp_path):
    for number in (1, 2):
        metadata_of(tmp_path / "metadata", range(NUM_ROWS), number)
    finish(parts_of(tmp_path))
    (tmp_path / "metadata/part_2.parquet").unlink()
    parts = parts_of(tmp_path)
    with pytest.raises(ConfigError, match="part_2 was downloaded for a part .* no longer.*--redo"):
        find_removed(tmp_path / "metadata", tmp_path / "out", parts, redo=False)
    assert find_removed(tmp_path / "metadata", tmp_path / "out", parts, True) == [tmp_path / "out/part_2"]
    # A file alone is one part of several.
    assert not find_removed(tmp_path / "metadata/part_1.parquet", tmp_path / "out", parts, False)


# --- with a server


@pytest.fixture
def server():
    with web.serve() as running:
        yield running


@pytest.mark.slow
def test_a_pipeline_follows_its_settings_and_keeps_what_it_fetched(server, tmp_path, capsys):
    def write(condition, image_size=64, rows=range(12)):
        urls = [server.url(f"good/{row}.jpg") for row in rows]
        table = pa.table({"URL": urls, "TEXT": [f"row {row}" for row in rows], "WIDTH": list(rows)})
        pq.write_table(table, tmp_path / "a.parquet")
        options = f"image_size: {image_size}, preflight: 0, processes_count: 1, number_sample_per_shard: 5"
        options = f"{{{options}, refuse_private: false}}"
        text = f"out: data\nmetadata: a.parquet\nfilter: {{where: 'WIDTH >= {condition}', no_shuffle: true}}\n"
        (tmp_path / "p.yaml").write_text(f"{text}download: {options}\nannotate: {{}}\nconvert: {{num_workers: 1}}\n")

    def run(**flags):
        pipeline(str(tmp_path / "p.yaml"), **flags)
        parts = [path for source in read_sources(tmp_path / "data/data/custom.filelist.list") for path in source.parts]
        return sorted(part.read(row).caption for part in map(Part, parts) for row in range(len(part)))

    wanted = lambda rows: sorted(f"row {row}" for row in rows)  # noqa: E731
    write(4)
    assert run() == wanted(range(4, 12))
    hits = server.hits.total()
    assert run() == wanted(range(4, 12)) and server.hits.total() == hits
    capsys.readouterr()
    run(dry_run=True)
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")] == []
    # A condition: the filter follows, what was fetched stays until it is told to go.
    write(6)
    with pytest.raises(ConfigError, match="images/part_1 holds another download .*--redo"):
        run()
    with pytest.raises(ConfigError, match="images/part_1 holds another download .*--redo"):
        run(dry_run=True)
    assert server.hits.total() == hits
    assert run(redo=True) == wanted(range(6, 12)) and server.hits.total() == hits + 6
    with pytest.raises(ConfigError, match="image_size was 64 and is 32"):
        write(6, 32)
        run()
    # Content: a picture that was changed by hand, and another table.
    write(6)
    path = next((tmp_path / "data/images/part_1").glob("*/*.txt"))
    assert run() == wanted(range(6, 12)) and server.hits.total() == hits + 6
    path.write_text("by hand")
    assert "by hand" in run()
    write(6, rows=range(20, 32))
    with pytest.raises(ConfigError, match="--redo"):
        run()
    assert run(redo=True) == wanted(range(20, 32))


@pytest.mark.slow
def test_a_download_made_again_has_the_pictures_of_its_metadata(server, tmp_path, capsys):
    def write(rows):
        urls = [server.url(f"good/{row}.jpg") for row in rows]
        pq.write_table(pa.table({"URL": urls, "TEXT": ["t"] * len(urls)}), tmp_path / "part_1.parquet")

    settings = {"preflight": 0, "processes_count": 1, "number_sample_per_shard": 4, "image_size": 64}
    settings |= {"refuse_private": False}
    write(range(6))
    download(str(tmp_path / "part_1.parquet"), str(tmp_path / "out"), **settings)
    write(range(10, 15))
    with pytest.raises(ConfigError, match="rows was 6 and is 5; it was made from other content"):
        download(str(tmp_path / "part_1.parquet"), str(tmp_path / "out"), **settings)
    report = download(str(tmp_path / "part_1.parquet"), str(tmp_path / "out"), redo=True, **settings)
    assert (report["rows"], report["success"], report["pending"]) == (5, 5, 0)
    found = [path.read_bytes() for path in sorted((tmp_path / "out/part_1").glob("*/*.jpg"))]
    assert found == [web.encode(web.picture(seed)) for seed in range(10, 15)]
