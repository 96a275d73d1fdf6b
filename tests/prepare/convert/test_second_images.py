"""Second images come through a conversion as the pictures do: untouched, checked, counted where they cannot be used."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from formats import WRITERS
from PIL import Image

from ppldm.data.filelist import read_sources
from ppldm.data.formats.open import open_part
from ppldm.data.formats.row import Row
from ppldm.prepare.convert.convert import Conversion, convert_source
from ppldm.prepare.convert.reencode import Treatment
from ppldm.utils.errors import ConfigError

NAMES = {"folder": "in", "webdataset": "in.tar", "parquet": "in.parquet", "csv": "in.csv", "mds": "in.mds"}


def picture(seed: int, size=(20, 14)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


ROWS = [Row(f"picture {n}", picture(n), {"key": f"{n:04}"}, (), picture(n + 100, (10, 7))) for n in range(7)]


def run(path, out, **options):
    return convert_source(path, out, **{"num_workers": 1, "rows_per_part": 3, "layout": "control"} | options)


def read(out) -> list[Row]:
    (source,) = read_sources(out / "custom.filelist.list")
    parts = [open_part(path, source) for path in source.parts]
    return [part.read(number) for part in parts for number in range(len(part))]


@pytest.mark.parametrize("format", [*NAMES, "jsonl"])
def test_they_come_through_from_every_format(tmp_path, format):
    path = tmp_path / NAMES.get(format, "in.jsonl")
    WRITERS["csv" if format == "jsonl" else format](tmp_path / "in.csv" if format == "jsonl" else path, ROWS)
    if format == "jsonl":
        lines = [{"file_name": f"in.csv-images/{key}.png", "text": row.caption, "key": key,
                  "conditioning_image": f"in.csv-images/{key}.control.png"}
                 for row in ROWS for key in (row.meta["key"],)]  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = run(path, tmp_path / "out")
    assert (manifest["rows_out"], manifest["skipped"]) == (7, {})
    assert (tmp_path / "out/custom.filelist.list").read_text() == "custom.filelist layout=control\n"
    rows = read(tmp_path / "out")
    assert [(row.caption, row.image, row.control) for row in rows] == [(r.caption, r.image, r.control) for r in ROWS]
    known = {"key", "sha256", "width", "height", "original_width", "original_height"}
    assert all(set(row.meta) == known for row in rows)
    conversion = Conversion(path, tmp_path / "out", rows_per_part=3, layout="control")
    assert conversion.plan()["parts_finished"] == 3
    with pytest.raises(ConfigError, match="holds another conversion"):
        run(path, tmp_path / "out", layout="default")


def test_rows_whose_second_image_cannot_be_used_are_counted_by_reason(tmp_path):
    bad = {1: (b"", "no_control"), 3: (picture(3, (10, 10)), "control"), 5: (picture(5)[:90], "image")}
    rows = [replace(row, control=bad[n][0]) if n in bad else row for n, row in enumerate(ROWS)]
    WRITERS["folder"](tmp_path / "in", rows)
    manifest = run(tmp_path / "in", tmp_path / "out")
    assert manifest["skipped"] == {reason: 1 for _, reason in bad.values()} and manifest["rows_out"] == 4
    assert [row.control for row in read(tmp_path / "out")] == [ROWS[n].control for n in (0, 2, 4, 6)]


def test_they_become_as_small_and_keep_their_encoding(tmp_path):
    large = [replace(row, control=row.image) for row in ROWS]
    WRITERS["folder"](tmp_path / "in", large)
    run(tmp_path / "in", tmp_path / "out", treatment=Treatment(size=7, format="jpg", quality=80))
    for row in read(tmp_path / "out"):
        first, second = (Image.open(io.BytesIO(one)) for one in (row.image, row.control))
        assert (first.size, first.format) == ((10, 7), "JPEG") and (second.size, second.format) == ((10, 7), "PNG")


def test_packed_folders_have_them_and_a_changed_one_is_made_anew(tmp_path):
    for number, name in enumerate("ab"):
        (tmp_path / "in" / name).mkdir(parents=True)
        WRITERS["folder"](tmp_path / "in" / name, ROWS[number * 3 : number * 3 + 4])
    run(tmp_path / "in", tmp_path / "out", rows_per_part=5, pack_folders=True)
    assert [row.control for row in read(tmp_path / "out")] == [ROWS[n].control for n in (0, 1, 2, 3, 3, 4, 5, 6)]
    (tmp_path / "in/b/0006.control.png").write_bytes(ROWS[0].control)
    run(tmp_path / "in", tmp_path / "out", rows_per_part=5, pack_folders=True)
    assert read(tmp_path / "out")[-1].control == ROWS[0].control


def test_other_layouts_are_not_written(tmp_path):
    WRITERS["folder"](tmp_path / "in", ROWS)
    with pytest.raises(ConfigError, match="--layout vc cannot be written; choose default or control"):
        run(tmp_path / "in", tmp_path / "out", layout="vc")
