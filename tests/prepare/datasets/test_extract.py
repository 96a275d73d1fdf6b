"""Files whose columns have names of their own become tars of samples, picture for picture, and `hf:` takes them."""

import json

import numpy as np
import pytest
from dataset_files import lines_of, parquet_of, pictures, tar_of, zip_of

from ppldm.data.formats.mds import MdsLayout
from ppldm.prepare.convert.units import find_units
from ppldm.prepare.datasets.extract import extract, make_captions
from ppldm.utils.errors import DataError

IMAGES = pictures(0, 3)
TEXTS = ["a  cat", "a dog", ""]
COLUMNS = {"image": "photo", "caption": "alt"}


def mds_of(columns: dict[str, tuple[str, list[bytes]]]) -> bytes:
    """A shard of MosaicML streaming: name -> (encoding, values)."""
    count = len(next(iter(columns.values()))[1])
    names = list(columns)
    head = {"column_names": names, "column_encodings": [columns[name][0] for name in names]}
    head = json.dumps(head | {"column_sizes": [None] * len(names), "version": 2, "format": "mds"}).encode()
    samples = []
    for number in range(count):
        values = [columns[name][1][number] for name in names]
        samples.append(np.array([*map(len, values)], "<u4").tobytes() + b"".join(values))
    first = 4 * (count + 2) + len(head)
    starts = np.cumsum([first, *map(len, samples)]).astype("<u4")
    return np.uint32(count).tobytes() + starts.tobytes() + head + b"".join(samples)


def write(folder, kind):
    """A file of each kind that is fetched, with IMAGES and TEXTS."""
    for number, image in enumerate(IMAGES):
        (folder / f"{number}.jpg").write_bytes(image)
    names = [f"{number}.jpg" for number in range(3)]
    samples = {}
    for name, image, text in zip(names, IMAGES, TEXTS, strict=True):
        samples |= {f"{name[0]}.photo": image, f"{name[0]}.json": json.dumps({"alt": text, "n": 1}).encode()}
    content = {
        "parquet": lambda: parquet_of(
            {"photo": [{"bytes": i} for i in IMAGES], "alt": [[t, "b"] for t in TEXTS], "n": [1] * 3}
        ),
        "jsonl": lambda: lines_of([{"photo": p, "alt": t, "n": 1} for p, t in zip(names, TEXTS, strict=True)]),
        "csv": lambda: "photo,alt,n\n{}".format(
            "".join(f'{p},"{t}",1\n' for p, t in zip(names, TEXTS, strict=True))
        ).encode(),
        "tar": lambda: tar_of(samples),
        "mds": lambda: mds_of(
            {
                "photo": ("jpeg", IMAGES),
                "alt": ("str", [t.encode() for t in TEXTS]),
                "n": ("int", [(1).to_bytes(8, "little")] * 3),
            }
        ),
    }[kind]()
    path = folder / f"a.{kind}"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "tar", "mds"])
def test_columns_by_name(tmp_path, kind):
    path, tar = write(tmp_path, kind), tmp_path / "rows/a.tar"
    account = extract(path, tar, None, COLUMNS)
    assert (account["rows_in"], account["rows_out"], sum(account["skipped"].values())) == (3, 2, 1)
    (unit,) = find_units(tar.parent)
    rows = [row for span in unit.spans(10) for _, row in unit.read(span)]
    assert [row.image for row in rows] == IMAGES[:2] and [row.caption for row in rows] == ["a cat", "a dog"]
    assert all(row.meta["n"] == 1 for row in rows)
    again = tmp_path / "again.tar"
    assert extract(path, again, None, COLUMNS) == account and again.read_bytes() == tar.read_bytes()
    with pytest.raises(DataError, match="none|no column"):
        extract(path, tmp_path / "none.tar", None, {"image": "none", "caption": "alt"})


def test_a_picture_elsewhere_is_not_read(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(IMAGES[0])
    (folder := tmp_path / "table").mkdir()
    (folder / "a.jsonl").write_bytes(lines_of([{"photo": "../secret.jpg", "alt": "a"}]))
    account = extract(folder / "a.jsonl", tmp_path / "a.tar", None, COLUMNS)
    assert account["skipped"] == {"no_image": 1} and not (tmp_path / "a.tar").exists()


def test_known_columns_need_no_names(tmp_path):
    shard = tmp_path / "a.mds"
    shard.write_bytes(mds_of({"jpg": ("jpeg", IMAGES), "caption": ("str", [b"a"] * 3)}))
    assert (MdsLayout(shard).image, MdsLayout(shard).caption) == ("jpg", "caption")


def test_rows_are_counted_by_reason(tmp_path):
    names = ["0.jpg", "1.jpg", "x/2.jpg"]
    (tmp_path / "a.zip").write_bytes(zip_of(dict(zip(names, IMAGES, strict=True)) | {"x/.2.jpg": b"", "note.md": b""}))
    rows = [{"key": "0", "caption": "z"}, {"key": "0", "caption": "a"}, {"key": "2", "caption": "b", "reason": "bad"}]
    (tmp_path / "c.jsonl").write_bytes(lines_of(rows))
    table = tmp_path / "captions.parquet"
    assert make_captions([tmp_path / "c.jsonl"], "SELECT * FROM read_json('{folder}/c.jsonl')", table) == {
        "captions": 2
    }
    account = extract(tmp_path / "a.zip", tmp_path / "a.tar", table, {})
    assert account["skipped"] == {"bad": 1, "no_caption": 1} and account["rows_in"] == 3
    assert extract(tmp_path / "a.zip", tmp_path / "b.tar", table, {}, most_rows=2)["rows_in"] == 2
    (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:-30])
    with pytest.raises(DataError, match="a.zip is damaged"):
        extract(tmp_path / "a.zip", tmp_path / "c.tar", table, {})
    assert not (tmp_path / "c.tar").exists()
