"""Law: every row of a file of latents or embeddings is complete, missing, bad or damaged, and counted once."""

import json

import numpy as np
import pytest
from formats import write_mds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.cached.file import CachedFile, cached_path, create_file, create_latents, unfinished_path
from ppldm.data.cached.key import EmbeddingsKey, LatentsKey
from ppldm.data.filelist import Source
from ppldm.data.formats.part import Part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.inspect.cached import describe_survey, has_faults, survey
from ppldm.inspect.parts import PartName
from ppldm.inspect.show import draw_latents
from ppldm.utils.errors import ConfigError, DataError

SHAPE = (4, 2, 2)
ONE = ("--num-workers", 1)


def write_latents(part: Part, folder=None, rows=None, flips=False, content=None):
    """Latents of the rows of a part of 16 x 16 pixels; those of `rows` are there."""
    source = Source(part.path.parent / "x.filelist", ())
    key = LatentsKey.of("0123", [(16, 16)], CropRule(random=False, flip=flips), "float32")
    key = key.of_part(source, content or part.identity)
    path = cached_path(part.path, key, folder)
    create_latents(path, key, {"channels": 4, "factor": 8}, part)
    file = CachedFile(path, key, writable=True)
    for row in range(len(part)) if rows is None else rows:
        for variant in range(key.num_variants):
            file.write(row, variant, np.random.default_rng(row).normal(size=(2, *SHAPE)))
    return path, file


def write_embeddings(part: Part, texts: list[int]):
    """Embeddings of so many texts of each row, all there, and of the empty caption."""
    key = EmbeddingsKey(
        text_encoder="4567", tokenizer="89", model_max_length=3, mask_pad_tokens=False, captions=("a",),
        dtype="float16", part=part.identity[:2], format="part", layout="default",
    )  # fmt: skip
    path, codes = cached_path(part.path, key), np.array([*texts, 1], np.uint8)
    create_file(path, key, {"width": 2, "variants": max(texts)}, codes, np.zeros((2, len(codes))), [b""] * len(codes))
    file = CachedFile(path, key, writable=True)
    for row, count in enumerate(codes):
        if not count:
            file.mark_bad(row, 0, "no_caption")
        for variant in range(count):
            file.write(row, variant, np.ones((3, 2)))
    return path, file


def names(data) -> list[PartName]:
    return [PartName(data / name, Source(data / "parts.filelist", ())) for name in ("a.gz", "b.gz")]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["complete", "missing", "half", "too_small", "damaged"]), min_size=10, max_size=10))
def test_every_row_is_counted_once(data, states):
    path, file = write_latents(Part("a.gz"), flips=True)
    for row, state in enumerate(states):
        if state in ("missing", "half"):
            for variant in range(2 if state == "missing" else 1):
                file.forget(row, variant)
        if state == "too_small":
            file.mark_bad(row, 1, "too_small")
        if state == "damaged":
            raw = bytearray(path.read_bytes())
            raw[file._place(row, 1).start + 5] ^= 1
            path.write_bytes(raw)
            file = CachedFile(path, writable=True)
    found = survey(names(data), 1, check_bytes=True)
    (one,) = found["cached"]
    numbers = {state: states.count(state) for state in ("complete", "missing", "half", "too_small", "damaged")}
    assert one["rows"] == 10 and one["complete"] == numbers["complete"] + numbers["damaged"]
    assert one["missing"] == numbers["missing"] + numbers["half"]
    assert one["bad"] == ({"too_small": numbers["too_small"]} if numbers["too_small"] else {})
    assert one["damaged"] == numbers["damaged"] and has_faults(found) == bool(numbers["damaged"])
    assert survey(names(data), 1, check_bytes=False)["cached"][0]["damaged"] == 0
    path.unlink()


def test_embeddings_are_counted_beside_latents_by_key(data):
    for name in "ab":
        part = Part(f"{name}.gz")
        write_latents(part)
        write_embeddings(part, [row % 3 for row in range(len(part))])
    found = survey(names(data), 1, check_bytes=True)
    latents, texts = sorted(found["cached"], key=lambda one: one["what"])
    assert (latents["what"], latents["files"], latents["rows"], latents["complete"]) == ("latents", 2, 22, 22)
    assert (texts["rows"], texts["complete"], texts["bad"]) == (22, 14, {"no_caption": 8})
    first, second, *more = describe_survey({"cached": [latents, texts]})
    assert first.startswith("latents of 22 of 22 rows, 16 x 16, crops center, float32, of 0123: 2 file(s)")
    assert second.startswith("text embeddings of 14 of 22 rows, 3 tokens, captions a, float16, of 4567")
    assert more == ["  bad rows, no_caption: 8"]


def test_verify_and_stats_tell_what_is_there_and_what_is_wrong(data, run, capsys):
    assert "cached" not in json.loads(run("stats", *ONE, "parts.filelist", "--json"))
    (data / "good.filelist").write_text("a.gz\n")
    path, file = write_latents(Part("a.gz"), rows=range(8))
    report = json.loads(run("verify", *ONE, "good.filelist", "--json"))
    assert report["ok"] == 10 and report["cached"][0]["missing"] == 2 and report["bad_files"] == {}
    assert "latents of 8 of 10 rows" in run("stats", *ONE, "good.filelist")
    raw = bytearray(path.read_bytes())
    raw[file._place(3, 0).start] ^= 1
    path.write_bytes(raw)
    write_latents(Part("a.gz"), flips=True, content=(5, 5))
    with pytest.raises(DataError, match="are damaged; the `ppldm precompute`"):
        run("verify", *ONE, "good.filelist")
    out = capsys.readouterr().out
    assert f"damaged: 1, for example {path} row 3" in out and "was made of another content of its part" in out


def test_latents_of_other_parts_in_a_folder_of_their_own_are_left_alone(data, run):
    (data / "good.filelist").write_text("a.gz\n")
    (data / "kept").mkdir()
    write_latents(Part("a.gz"), folder=data / "kept")
    write_latents(Part("a.gz"), folder=data / "kept", content=(5, 5))
    report = json.loads(run("verify", *ONE, "good.filelist", "--latents-dir", "kept", "--json"))
    assert report["cached"][0]["files"] == 1 and report["bad_files"] == {}
    assert "cached" not in json.loads(run("verify", *ONE, "good.filelist", "--json"))


@pytest.mark.parametrize("line", ["", "parts.filelist latents=cached"])
def test_parts_that_are_not_here_are_verified_from_their_latents(data, run, line):
    for name in ("a.gz", "b.gz"):
        write_latents(Part(name))
        (data / name).unlink()
    (data / "gone.list").write_text(line or "parts.filelist")
    report = json.loads(run("verify", *ONE, "gone.list", "--json"))
    assert (report["rows"], report["ok"], report["cached"][0]["files"]) == (22, 22, 2)
    measured = json.loads(run("stats", *ONE, "gone.list", "--json"))
    assert measured["width"][0] == 20 and measured["image_kb"] == [] and measured["skipped"] == {}


def test_latents_are_drawn_where_there_is_no_picture(data, run):
    for name in ("a.gz", "b.gz"):
        write_latents(Part(name), rows=range(9))
        (data / name).unlink()
    (data / "gone.list").write_text("parts.filelist latents=cached\n")
    assert "22 of 22 rows are drawn" in run("show", *ONE, "gone.list", "--out", "s.png", "--side", 64)
    assert np.asarray(Image.open(data / "s.png")).std() > 10
    assert "no picture here" in run("head", "gone.list", "-n", 1)
    with pytest.raises(DataError, match="no picture here, but latents"):
        run("repack", "gone.list", "--out", "out", *ONE)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
def test_a_picture_of_latents_has_their_size_and_order(channels):
    latents = np.random.default_rng(0).normal(size=(channels, 20, 30)).astype(np.float32)
    picture = np.asarray(draw_latents(latents)).astype(int)
    assert picture.shape == (20, 30, 3) and (picture.min(), picture.max()) == (0, 255)
    for colour in range(3):
        own, drawn = latents[min(colour, channels - 1)].ravel(), picture[..., colour].ravel()
        assert (np.diff(drawn[np.argsort(own)]) >= 0).all()
    assert np.asarray(draw_latents(np.zeros((4, 2, 2), np.float32))).max() == 0 and draw_latents(None) is None


def test_shards_of_latents_are_verified_and_drawn(data, run, capsys):
    latents = np.random.default_rng(0).normal(size=(4, 4, 4)).astype("<f2")
    wrong = [latents.tobytes()] * 5
    wrong[2], wrong[3] = np.full(64, np.nan, "<f2").tobytes(), b"x"
    columns = {
        "caption": ("str", None, lambda row: row.caption.encode()),
        "latents_32": ("bytes", None, lambda row: wrong[row.meta["n"]]),
    }
    write_mds(data / "shard.00000.mds", [Row(f"row {n}", b"", {"n": n}) for n in range(5)], columns)
    (data / "mds.filelist").write_text("shard.00000.mds\n")
    (data / "mds.list").write_text("mds.filelist format=mds latents=cached\n")
    with pytest.raises(DataError):
        run("verify", *ONE, "mds.list", "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["skipped"]) == (3, {"latents": 1, "not_finite": 1})
    assert json.loads(run("stats", *ONE, "mds.list", "--json"))["skipped"] == {}
    assert "5 of 5 rows are drawn" in run("show", *ONE, "mds.list", "--out", "s.png", "--side", 64)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.sets(st.sampled_from(["current", "flipped", "older", "unfinished", "damaged", "texts"])),
    delete=st.sampled_from(["stale", "flipped", "nothing"]),
    apart=st.booleans(),
)
def test_files_are_listed_by_what_they_are_of_and_those_of_a_line_removed(data, run, files, delete, apart):
    """Beside a part nothing but a file of its content is current; in a folder of its own another is of other data."""
    (data / "good.filelist").write_text("a.gz\n")
    folder, part, made = data / "kept" if apart else None, Part("a.gz"), {}
    (data / "kept").mkdir(exist_ok=True)
    for path in (*data.glob("*.latents*"), *data.glob(".*.latents*"), *data.glob("*.embeddings"), *data.glob("kept/*")):
        path.unlink(missing_ok=True)
    for name in files & {"current", "flipped"}:
        made[name] = write_latents(part, folder, flips=name == "flipped")[0]
    for name in files & {"older", "unfinished"}:
        made[name] = write_latents(part, folder, content=(5, len(name)))[0]
    if "unfinished" in made:
        made["unfinished"] = made["unfinished"].replace(unfinished_path(made["unfinished"]))
    if "damaged" in files:
        made["damaged"] = (folder or data) / "a.gz.01234567.latents"
        made["damaged"].write_bytes(b"x" * 99)
    if "texts" in files and not apart:
        made["texts"] = write_embeddings(part, [1] * len(part))[0]
    ask = ["cached", "good.filelist", *(["--latents-dir", "kept"] if apart else []), "--json"]
    lines = json.loads(run(*ask))
    state = {path: line["state"] for line in lines for path in line["paths"]}
    made = {name: path.relative_to(data) if path.is_absolute() else path for name, path in made.items()}
    stale = "other" if apart else "stale"
    due = {"older": stale, "unfinished": stale, "damaged": "stale"}
    assert state == {str(path): due.get(name, "current") for name, path in made.items()}
    gone = {name for name in made if due.get(name) == "stale"} if delete == "stale" else {delete} & {*made}
    if delete == "stale" or gone:
        path = str(made["flipped"]) if delete == "flipped" else ""
        words = next((line["id"] for line in lines if path in line["paths"]), "stale")
        assert "deleted" in run(*ask[:-1], "--delete", words) or not gone
    left = {name for name, path in made.items() if path.exists()}
    assert left == made.keys() - gone
    with pytest.raises(ConfigError, match="--delete 0000 is neither"):
        run(*ask, "--delete", "0000")
