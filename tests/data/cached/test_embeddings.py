"""A data set gives the embeddings of the captions that it draws, for any rule of captions that can be enumerated."""

import io
import pickle
import zlib
from dataclasses import replace

import numpy as np
import pytest
from formats import write_mds
from PIL import Image

from ppldm.cache.plan import PartCaptions, read_captions
from ppldm.data.cached.file import CachedFile, cached_path, create_file, read_key
from ppldm.data.cached.key import EmbeddingsKey
from ppldm.data.cached.run import CachedEmbeddings, EmbeddingsRule
from ppldm.data.filelist import Source, list_parts
from ppldm.data.formats.open import OpenParts, open_part
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.inputs import TextEmbeddings
from ppldm.data.text.captions import CaptionRule, TagRule
from ppldm.utils.errors import ConfigError, PartError, RowError

KEY = EmbeddingsKey(
    text_encoder="a" * 32, tokenizer="b" * 32, model_max_length=8, mask_pad_tokens=False, dtype="float32"
)
RULE = EmbeddingsRule(KEY)
SEVERAL = (("caption", 1.0), ("blip", 2.0), ("five", 2.0))
RULES = {
    "own": CaptionRule(0.3),
    "several": CaptionRule(0.1, SEVERAL),
    "first": CaptionRule(0.1, SEVERAL, "first"),
    "clean": CaptionRule(0.0, SEVERAL, clean=True),
}


def embed(text: str, length: int = 8) -> np.ndarray:
    """What stands for the hidden states of a caption."""
    return np.random.default_rng(zlib.crc32(text.encode())).standard_normal((length, 4)).astype(np.float32)


def write_embeddings(source, captions, run_key=KEY):
    for path in source.parts:
        part = open_part(path, source)
        key = run_key.with_captions(captions).of_part(source, part.identity[:2])
        texts = read_captions(part, captions)
        made = PartCaptions(texts, 4)
        create_file(cached_path(path, key), key, made.header, made.find_codes(key), made.sizes, made.texts)
        file = CachedFile(cached_path(path, key), key, writable=True)
        for row, found in enumerate([*texts, [""]]):
            if isinstance(found, RowError):
                file.mark_bad(row, 0, found.reason)
            else:
                for place, text in enumerate(found):
                    file.write(row, place, embed(text, key.model_max_length + key.text_projection))


@pytest.fixture
def sources(make_sources, make_image, tmp_path):
    sources = make_sources([5, 9], [4])
    rows = [
        Row(f"picture {i}", make_image(i), {"blip": f"BLIP {i} @me", "five": [f"one {i}", " ", f"two {i}"][: i % 4]})
        for i in range(9)
    ]
    rows[4] = Row("picture 4", make_image(4), {"blip": "BLIP 4"})
    write_part(tmp_path / "list0-part-00001.gz", rows)
    return sources


def keys(dataset, epochs=4):
    return [(epoch, place) for epoch in range(epochs) for place in range(len(dataset))]


@pytest.mark.parametrize("name", RULES)
def test_embeddings_are_those_of_the_captions_drawn_online(sources, make_dataset, name, monkeypatch):
    for source in sources:
        write_embeddings(source, RULES[name])
    settings = {"captions": vars(RULES[name])}
    online, cached = make_dataset(sources, **settings), make_dataset(sources, embeddings=RULE, **settings)
    drawn = []
    monkeypatch.setattr(
        online.tokenizer, "encode", lambda captions: drawn.append(captions) or np.zeros((len(captions), 8))
    )
    expected, found = online.make_batch(keys(online)), cached.make_batch(keys(cached))
    assert found.keys() == expected.keys() | {"text_embeddings"} and len({*drawn[0]}) > 16
    for name in expected.keys() - {"input_ids", "checksums"}:
        assert np.array_equal(found[name], expected[name])
    assert found["text_embeddings"].dtype == np.float32
    assert np.array_equal(found["text_embeddings"], np.stack([embed(text) for text in drawn[0]]))
    assert np.array_equal(found["input_ids"], cached.tokenizer.encode(drawn[0]))
    again = pickle.loads(pickle.dumps(cached)).make_batch(keys(cached))
    assert np.array_equal(again["text_embeddings"], found["text_embeddings"])
    assert make_dataset(sources).sample_bytes + 8 * 4 * 4 == cached.sample_bytes
    monkeypatch.undo()
    assert np.array_equal(online.make_batch(keys(online))["checksums"], found["checksums"])


CHANGES = {
    "text_encoder": {"text_encoder": "c" * 32},
    "tokenizer": {"tokenizer": "c" * 32},
    "model_max_length": {"model_max_length": 9},
    "mask_pad_tokens": {"mask_pad_tokens": True},
    "dtype": {"dtype": "float16"},
    "captions": CaptionRule(weights=(("blip", 1.0),)),
    "caption_choice": CaptionRule(choice="first"),
    "clean_captions": CaptionRule(clean=True),
    "text_projection": {"text_projection": True},
}


@pytest.mark.parametrize("name", CHANGES)
def test_embeddings_of_something_else_are_refused_by_the_field(sources, make_dataset, name):
    change = CHANGES[name]
    other = (CaptionRule(), replace(KEY, **change)) if isinstance(change, dict) else (change, KEY)
    for source in sources:
        write_embeddings(source, *other)
    with pytest.raises(PartError, match=rf"{name} was .* and is .*ppldm precompute FILELIST --text-encoder DIR"):
        make_dataset(sources, embeddings=RULE)


def test_weights_and_drop_are_no_part_of_the_key(sources, make_dataset):
    for source in sources:
        write_embeddings(source, CaptionRule(0.0, SEVERAL))
    others = tuple((name, 7.0 - weight) for name, weight in SEVERAL)
    make_dataset(sources, captions={"drop_probability": 0.9, "weights": others}, embeddings=RULE)


def test_other_content_of_a_part_is_refused(sources, make_dataset, make_rows, tmp_path):
    for source in sources:
        write_embeddings(source, CaptionRule())
    write_part(tmp_path / "list0-part-00000.gz", make_rows(7, 12))
    with pytest.raises(PartError, match="part was .* and is"):
        make_dataset(sources, embeddings=RULE)


def test_what_is_missing_damaged_or_of_another_width_is_named(sources, make_dataset, tmp_path):
    with pytest.raises(PartError, match="has no cached text embeddings in .*--model-max-length 8"):
        make_dataset(sources, embeddings=RULE)
    for source in sources:
        write_embeddings(source, CaptionRule())
    dataset, (path,) = make_dataset(sources, embeddings=RULE), tmp_path.glob("list1*.embeddings")
    assert len(CachedFile(path)) == 5 and read_key(path).what == "text embeddings"
    CachedFile(path, writable=True).forget(2, 0)
    with pytest.raises(PartError, match="lacks embeddings of row 2; complete it with"):
        dataset.make_batch([(1, 16)])
    data = bytearray(path.read_bytes())
    data[-8 * 4 * 4 * 2 + 5] ^= 1  # of the last row before the empty caption
    path.write_bytes(data)
    with pytest.raises(PartError, match="row 3 is damaged"):
        make_dataset(sources, captions={"drop_probability": 0.0}, embeddings=RULE).make_batch([(0, 17)])
    parts = OpenParts([(sources[1].parts[0], sources[1])], 4, [read_key(path).part])
    wide = CachedEmbeddings(RULE, TextEmbeddings(8, 5), CaptionRule(), parts)
    with pytest.raises(PartError, match=r"of shape \(8, 4\), not \(8, 5\)"):
        wide.read(0, 0, 0)


def test_embeddings_that_are_not_finite_are_a_bad_row(sources, make_dataset, tmp_path):
    for source in sources:
        write_embeddings(source, CaptionRule())
    (path,) = tmp_path.glob("list1*.embeddings")
    assert CachedFile(path, writable=True).write(1, 0, np.full((8, 4), np.inf, np.float32)) is None
    dataset = make_dataset(sources, captions={"drop_probability": 0.0}, embeddings=RULE)
    sample = dataset[0, 15]
    assert sample["skipped"] == ["not_finite"] and sample["row_ids"] != 15


def test_captions_that_cannot_be_enumerated_are_refused(sources, make_dataset):
    for rule in ({"tags": TagRule(shuffle=True)}, {"wildcards": True}):
        with pytest.raises(ConfigError, match="drawn anew in every epoch"):
            make_dataset(sources, captions=rule, embeddings=RULE)
    with pytest.raises(PartError, match="row 1 has 251 captions"):
        PartCaptions([["a"], ["a"] * 251], 4)


def test_files_of_embeddings_are_no_parts(sources, tmp_path):
    for number in range(2):
        write_embeddings(replace(sources[0], parts=sources[0].parts[number : number + 1]), CaptionRule())
    for path in [*tmp_path.glob("list0-part*")]:
        path.rename(path.with_name(path.name.removeprefix("list0-")))
    assert [path.rpartition("/")[2] for path in list_parts(tmp_path)] == ["part-00000.gz", "part-00001.gz"]


def write_shard(path, length=8, count=6):
    """As micro_diffusion writes latents and embeddings."""
    columns = {
        "caption": ("str", None, lambda row: row.caption.encode()),
        "caption_latents": ("bytes", None, lambda row: embed(row.caption, length).astype("<f2").tobytes()),
        "jpg": ("jpeg", None, lambda row: row.image),
    }
    write_mds(path, [Row(f"picture {n}", image_of(n), {}) for n in range(count)], columns)
    return Source(path.with_name("mds.filelist"), (path,), format="mds")


def image_of(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_a_shard_of_mds_holds_its_own_embeddings_and_zeros_for_the_empty_caption(make_dataset, tmp_path):
    source, rule = write_shard(tmp_path / "s.mds"), replace(RULE, empty_is_zeros=True)
    dataset = make_dataset([source], captions={"drop_probability": 0.4}, embeddings=rule)
    batch = dataset.make_batch([(epoch, row) for epoch in range(8) for row in range(6)])
    dropped = 0
    for row, found in zip(batch["row_ids"], batch["text_embeddings"], strict=True):
        wanted = embed(f"picture {row}").astype("<f2").astype(np.float32)
        assert not found.any() or np.array_equal(found, wanted)
        dropped += not found.any()
    assert 8 <= dropped <= 30


@pytest.mark.parametrize(
    "captions, rule, length, error, message",
    [
        ({}, RULE, 8, ConfigError, "no embedding of an empty caption; train with --empty_caption"),
        ({"weights": SEVERAL}, replace(RULE, empty_is_zeros=True), 8, ConfigError, "omit --captions"),
        ({"drop_probability": 0.0}, RULE, 7, PartError, "56 bytes of latents where 8 x 4 float16 .*--model_max"),
    ],
)
def test_a_shard_that_cannot_serve_is_refused(make_dataset, tmp_path, captions, rule, length, error, message):
    source = write_shard(tmp_path / "s.mds", length)
    with pytest.raises(error, match=message):
        make_dataset([source], captions=captions, embeddings=rule)
