"""Law: after `forget`, no byte string of a row that was taken out, neither a text of it nor its picture nor what a
network made of it, stands in any file of the data's folders; what there is of the other rows is the same to the byte.
"""

import base64
import contextlib
import gzip
import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.cache.plan import PartCaptions
from ppldm.data.cached.file import CachedFile, Latents, cached_path, create_file, create_latents, unfinished_path
from ppldm.data.cached.key import EmbeddingsKey, LatentsKey
from ppldm.data.filelist import Source
from ppldm.data.formats.part import Part
from ppldm.data.images import CropRule
from ppldm.prepare.convert.convert import convert_source
from ppldm.prepare.provenance.forget import describe, forget_rows
from ppldm.prepare.provenance.forgotten import Forgotten
from ppldm.prepare.provenance.recaption import recaption_rows
from ppldm.utils.errors import DataError
from ppldm.utils.pictures import save_png

ROWS, PER_PART = 7, 3
CENTER, RANDOM = CropRule(random=False), CropRule(num_crops=2, random=True)


def of_row(row: int, name: str) -> str:
    """A text that is found nowhere but where the row is."""
    return f"{name}-{zlib.crc32(f'{row} {name}'.encode()):08x}-{row}"


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """Converted parts of ROWS rows, with a further caption."""
    folder = tmp_path_factory.mktemp("forget")
    (folder / "in").mkdir()
    captions = []
    for row in range(ROWS):
        pixels = np.random.default_rng(row).integers(0, 256, (16, 16, 3), np.uint8)
        save_png(folder / f"in/{row:04}.png", pixels)
        (folder / f"in/{row:04}.txt").write_text(of_row(row, "caption"))
        (folder / f"in/{row:04}.json").write_text(json.dumps({"url": url(row), "license": of_row(row, "license")}))
        captions.append(json.dumps({"url": url(row), "caption": of_row(row, "second")}))
    (folder / "captions.jsonl").write_text("\n".join(captions))
    convert_source(folder / "in", folder / "plain", num_workers=1, rows_per_part=PER_PART)
    recaption_rows(folder / "plain", folder / "data", folder / "captions.jsonl", "second")
    return folder


def url(row: int) -> str:
    return f"http://{of_row(row, 'host')}/{of_row(row, 'file')}.png"


SOURCE = Source((), Path("x.filelist"))


def latents_key(content, crops=CENTER) -> LatentsKey:
    return LatentsKey.of("vae", [(16, 16)], crops, "float32").of_part(SOURCE, content)


def embeddings_key(content) -> EmbeddingsKey:
    key = EmbeddingsKey(
        text_encoder="clip", tokenizer="words", model_max_length=4, mask_pad_tokens=False, dtype="float32"
    )
    return key.of_part(SOURCE, content)


def array(row_text: str, shape, variant) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(f"{row_text} {variant}".encode())).random(shape, np.float32)


def write_caches(part: Path, folder: Path | None, unfinished: bool, content=None) -> list[Path]:
    """Latents of centres and of enumerated crops, and embeddings, as `ppldm precompute` makes them of a part."""
    paths, rows = [], Part(part)
    captions = [rows.read(row).caption for row in range(len(rows))]
    content = content or rows.identity[:2]
    for key in (latents_key(content), latents_key(content, RANDOM), embeddings_key(content)):
        path = cached_path(part, key, folder)
        path = unfinished_path(path) if unfinished else path
        if isinstance(key, LatentsKey):
            create_latents(path, key, {"channels": 4, "factor": 8}, rows)
        else:
            # One row has two captions, so that the most of a row may go with it.
            made = PartCaptions([[one, "two"] if one.endswith("-1") else [one] for one in captions], 8)
            create_file(path, key, made.header, made.find_codes(key), made.sizes, made.texts)
        file = CachedFile(path, key, writable=True)
        for row, name in enumerate([*captions, ""][: len(file)]):
            for variant in range(int(file.cells.counts[file.codes[row]])):
                number = row if key.depends_on_number else None
                file.write(row, variant, array(f"{name} {number} {key.suffix}", file._shape(row), variant))
        file.flush()
        file.close()
        paths.append(path)
    return paths


def traces(row: int, folder: Path) -> list[bytes]:
    """Byte strings that stand for a row and for nothing else."""
    texts = [of_row(row, name).encode() for name in ("caption", "license", "second", "file")]
    image = (folder / f"in/{row:04}.png").read_bytes()
    arrays = []
    for number in range(PER_PART):
        for key_number in (None, number):
            for suffix, shape in ((".latents", (2, 4, 2, 2)), (".embeddings", (4, 8))):
                arrays += [array(f"{of_row(row, 'caption')} {key_number} {suffix}", shape, v).tobytes() for v in (0, 1)]
    return [*texts, image[60:], base64.b64encode(image), *arrays]


def everything(*folders: Path) -> dict[Path, bytes]:
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                found[path] = data
                if path.name.startswith(("part-", ".part-")) and data[:2] == b"\x1f\x8b":
                    found[path] += gzip.decompress(data)
    return found


def assert_gone(gone, folder, *folders):
    files = everything(*folders)
    for row in gone:
        for trace in traces(row, folder):
            assert not [path for path, data in files.items() if trace in data], (row, trace[:40])


@settings(max_examples=20, deadline=None)
@given(
    gone=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS - 1),
    apart=st.booleans(),
    unfinished=st.booleans(),
    by=st.sampled_from(["url", "key", "domain"]),
)
def test_after_forget_nothing_of_a_row_is_left_and_all_of_the_others(
    made, tmp_path_factory, gone, apart, unfinished, by
):
    root = tmp_path_factory.mktemp("case")
    data, folder = root / "data", root / "latents" if apart else None
    shutil.copytree(made / "data", data)
    (root / "latents").mkdir()
    parts = sorted((data / "parts").glob("part-?????.gz"))
    for part in parts:
        write_caches(part, folder, unfinished)
        write_caches(part, folder, False, content=(1, 2))  # of an older content
        (part.parent / f".{part.name}.abc.tmp").write_bytes(part.read_bytes())  # as a kill leaves it
        (part.parent / f"{part.name}.points").write_bytes(gzip.decompress(part.read_bytes()))
    names = {"url": [url(row) for row in gone], "key": [f"{row:04}" for row in gone],
             "domain": [of_row(row, "host") for row in gone]}[by]  # fmt: skip
    wanted = Forgotten(**{f"{by}s": frozenset(names)})
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in data.rglob("part-*.gz")
            if not {row // PER_PART for row in gone} & {int(path.name[5:10])}}  # fmt: skip
    dry = forget_rows(data, wanted, dry_run=True, latents_dirs=[root / "latents"])
    report = forget_rows(data, wanted, latents_dirs=[root / "latents"])
    assert report["rows_found"] == len(gone)
    assert dry["cached"] == report["cached"] and set(report["cached"].values()) <= {"rewritten", "deleted"}
    assert "cached latents" in describe(report)
    assert_gone(gone, made, data, root / "latents")
    assert all((path.stat().st_mtime_ns, path.read_bytes()) == one for path, one in kept.items())
    # What is left is, to the byte, what would be made of the parts as they are now.
    for part in sorted((data / "parts").glob("part-?????.gz")):
        compare_with_new(part, folder, unfinished, root)


def compare_with_new(part: Path, folder, unfinished, root) -> None:
    (root / "new").mkdir(exist_ok=True)
    for path in write_caches(part, root / "new", unfinished):
        found = (folder or part.parent) / path.name
        assert found.is_file(), found
        new, old = CachedFile(path), CachedFile(found)
        if not new.key.depends_on_number:
            assert found.read_bytes() == path.read_bytes()
            continue
        assert (old.codes == new.codes).all() and [old.text(row) for row in range(len(old))] == [
            new.text(row) for row in range(len(new))
        ]
        for row in range(len(old)):  # those that moved are to be made again, no other is wrong
            for variant in range(old.num_variants):
                one = old.read(row, variant)
                assert one is None or (one == new.read(row, variant)).all()


def test_a_row_that_stays_where_it_is_keeps_its_enumerated_crops(made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    part = tmp_path / "data/parts/part-00000.gz"
    write_caches(part, None, False)
    forget_rows(tmp_path / "data", Forgotten(keys=frozenset(["0001"])))
    file = Latents(cached_path(part, latents_key(Part(part).identity[:2], RANDOM)))
    assert [file.read(row, 0) is None for row in range(2)] == [False, True]


def test_killed_anywhere_the_same_command_leaves_nothing(made, tmp_path):
    gone, stop, finished = [0, 1, 4], 0, False
    wanted = Forgotten(keys=frozenset(f"{row:04}" for row in gone))
    while not finished:
        root = tmp_path / str(stop)
        shutil.copytree(made / "data", root / "data")
        (root / "latents").mkdir()
        for part in sorted((root / "data/parts").glob("part-?????.gz")):
            write_caches(part, root / "latents", False)
        calls, replaced = iter(range(1000)), os.replace

        def dying(*arguments, calls=calls, replaced=replaced, stop=stop):
            if next(calls) >= stop:
                raise KeyboardInterrupt
            replaced(*arguments)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", dying)
            forget_rows(root / "data", wanted, latents_dirs=[root / "latents"])
            finished = True
        other = Forgotten(keys=frozenset(["0005"])) if stop % 2 else wanted
        forget_rows(root / "data", other, latents_dirs=[root / "latents"])
        assert_gone([*gone, *([5] if stop % 2 else [])], made, root / "data", root / "latents")
        for part in sorted((root / "data/parts").glob("part-?????.gz")):
            compare_with_new(part, root / "latents", False, root)
        stop += 1
    assert stop > 12


def test_in_a_folder_of_their_own_the_files_of_other_data_stay(made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    (tmp_path / "latents").mkdir()
    other = [tmp_path / "data/parts/part-00000.gz", tmp_path / "data/parts/part-00001.gz"]
    # Latents under the name of one part, of the rows of another: as of other data with parts of the same names.
    shutil.copy(other[1], tmp_path / "part-00000.gz")
    theirs = write_caches(tmp_path / "part-00000.gz", tmp_path / "latents", False)
    own = write_caches(other[0], tmp_path / "latents", False)
    report = forget_rows(tmp_path / "data", Forgotten(keys=frozenset(["0001"])), latents_dirs=[tmp_path / "latents"])
    assert all(path.is_file() for path in theirs) and not any(path.is_file() for path in own)
    # Nobody can tell what those of captions were made of.
    assert report["cached_unknown"] == [str(theirs[2])] and str(theirs[2]) in describe(report)


def test_what_the_cache_folder_has_of_the_part_goes_too(made, tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(made / "data", tmp_path / "data")
    from ppldm.data.formats.index import COLUMNS

    part = tmp_path / "data/parts/part-00000.gz"
    columns = COLUMNS.cached_index_path(part)
    columns.parent.mkdir()
    shutil.copy(COLUMNS.index_path(part), columns)
    shutil.copy(columns, COLUMNS.of_layout("vc").index_path(part))
    forget_rows(tmp_path / "data", Forgotten(keys=frozenset(["0001"])))
    assert_gone([1], made, tmp_path / "data", tmp_path / "cache")


def test_where_no_row_is_left_nothing_is(made, tmp_path):
    shutil.copytree(made / "data", tmp_path / "data")
    for part in sorted((tmp_path / "data/parts").glob("part-?????.gz")):
        write_caches(part, None, False)
    with pytest.raises(DataError, match="no row"):
        forget_rows(tmp_path / "data", Forgotten(urls=frozenset(map(url, range(ROWS)))))
    assert_gone(range(ROWS), made, tmp_path / "data")


def test_what_was_forgotten_by_its_url_is_known_again_without_it(made, tmp_path):
    data = tmp_path / "data"
    convert_source(made / "in", data, num_workers=1, rows_per_part=PER_PART)
    forget_rows(data, Forgotten(urls=frozenset([url(1)])))
    for path in (data / "parts").iterdir():
        path.unlink()
    manifest = convert_source(made / "in", data, num_workers=1, rows_per_part=PER_PART)
    assert manifest["skipped"] == {"forgotten": 1}
    assert_gone([1], made, data)
    assert replace(Forgotten(urls=frozenset([url(1)]))).covers({"url": url(1)}, ".") == [url(1)]
