"""Laws: packed, the parts have the rows of all folders, in order, as many as asked for each; a row still says where it
is from."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from ppldm.data.formats.part import Part
from ppldm.prepare.convert.convert import Conversion, convert_source
from ppldm.prepare.convert.units import FolderUnit, PackedUnit, Span, pack
from ppldm.prepare.provenance.forget import forget_rows
from ppldm.prepare.provenance.forgotten import Forgotten
from ppldm.prepare.provenance.lineage import trace_rows
from ppldm.utils.errors import ConfigError

SIZES = {"a": 3, "b/1": 1, "b/2": 5, "b/10": 2, "c": 12}  # rows of each folder


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    for seed, (name, rows) in enumerate(SIZES.items()):
        (folder / name).mkdir(parents=True)
        for row in range(rows):
            file = io.BytesIO()
            Image.fromarray(np.full((8, 8, 3), 20 * seed + row, np.uint8)).save(file, "PNG")
            (folder / name / f"{row:04}.png").write_bytes(file.getvalue())
            (folder / name / f"{row:04}.txt").write_text(f"{name} {row}")
            (folder / name / f"{row:04}.json").write_text(json.dumps({"url": f"http://x/{name}/{row}"}))
    return folder


def captions(out, manifest) -> list[list[str]]:
    parts = [Part(out / entry["path"]) for entry in manifest["parts"]]
    return [[part.read(row).caption for row in range(len(part))] for part in parts]


@pytest.mark.parametrize("rows_per_part", [1, 2, 4, 5, 23, 100])
def test_parts_are_full_and_keep_the_order(source, tmp_path, rows_per_part):
    plain = convert_source(source, tmp_path / "plain", rows_per_part=rows_per_part, num_workers=1)
    asked = {"rows_per_part": rows_per_part, "num_workers": 1, "pack_folders": True}
    packed = convert_source(source, tmp_path / "packed", **asked)
    rows = sum(captions(tmp_path / "plain", plain), [])
    assert len(rows) == sum(SIZES.values())
    assert captions(tmp_path / "packed", packed) == [
        rows[start : start + rows_per_part] for start in range(0, len(rows), rows_per_part)
    ]
    plan = Conversion(source, tmp_path / "packed", **asked).plan()
    assert plan["parts"] == plan["parts_finished"] == -(-len(rows) // rows_per_part)


def test_a_changed_folder_changes_the_parts_that_have_its_rows(source, tmp_path):
    settings = {"rows_per_part": 4, "num_workers": 1, "pack_folders": True}
    convert_source(source, tmp_path / "out", **settings)
    before = [path.read_bytes() for path in sorted((tmp_path / "out/parts").glob("*.gz"))]
    (source / "b/10/0000.txt").write_text("new")
    convert_source(source, tmp_path / "out", **settings)
    after = [path.read_bytes() for path in sorted((tmp_path / "out/parts").glob("*.gz"))]
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, False, True, False, False, False]
    with pytest.raises(ConfigError):
        convert_source(source, tmp_path / "out", **settings | {"pack_folders": False})


def test_a_row_says_where_it_is_from(source, tmp_path):
    out = tmp_path / "out"
    manifest = convert_source(source, out, rows_per_part=100, num_workers=1, pack_folders=True)
    assert [part["source"] for part in manifest["parts"]] == ["*"]
    [found] = trace_rows(out, ["b/2/0003"])
    assert found["source"] == "b/2" == found["meta"]["folder"] and found["meta"]["url"] == "http://x/b/2/3"
    with pytest.raises(ConfigError, match="key 0001 is in 4 places"):
        forget_rows(out, Forgotten(keys=frozenset(["0001"])))
    assert forget_rows(out, Forgotten(keys=frozenset(["b/2/0001"])))["rows_found"] == 1
    again = convert_source(source, out, rows_per_part=100, num_workers=1, pack_folders=True)
    assert again["rows_out"] == 22 and again["skipped"] == {"forgotten": 1}


def test_other_units_stay_between_packed_folders(tmp_path):
    class Tar:
        path = tmp_path / "x.tar"

    def folder(name, *spans):
        return [(FolderUnit(tmp_path / name), Span(start, stop, stop - start)) for start, stop in spans]

    tar = (Tar(), Span(0, 100, 2))
    cut = [*folder("a", (0, 3), (3, 4)), tar, *folder("b", (0, 1)), *folder("c", (0, 7))]
    packed = pack(cut, tmp_path, 3)
    assert packed.pop(2) == tar
    assert [unit.pieces for unit, _ in packed] == [
        (("a", Span(0, 3, 3)),),
        (("a", Span(3, 4, 1)),),
        (("b", Span(0, 1, 1)), ("c", Span(0, 2, 2))),
        (("c", Span(2, 5, 3)),),
        (("c", Span(5, 7, 2)),),
    ]
    assert all(isinstance(unit, PackedUnit) and span.rows == span.stop for unit, span in packed)


def test_many_small_parts_are_mentioned(source, tmp_path, caplog):
    convert_source(source, tmp_path / "one", rows_per_part=100, num_workers=1)
    assert "5 folders make 5 parts; --pack-folders makes 1" in caplog.text
    caplog.clear()
    convert_source(source, tmp_path / "two", rows_per_part=5, num_workers=1)
    assert "--pack-folders" not in caplog.text
