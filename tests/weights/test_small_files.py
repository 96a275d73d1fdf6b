"""Every small file of a model is a regular one, within its folder, bounded and of its type; or one line says what is
wrong, nothing hangs and nothing of another file is shown."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from single_files import small_stable_diffusion
from small_weights import small_weights

import ppldm
from ppldm.config.network_files import vocabulary_folder
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab, load_tokenizer
from ppldm.utils.errors import ConfigError, ModelError, PpldmError
from ppldm.weights.formats.files import read_arrays, read_component_arrays, weight_files, write_safetensors
from ppldm.weights.layouts.compvis import read_yaml
from ppldm.weights.source import open_model
from ppldm.weights.write import copy_tokenizer, write_weights

SECRET = "root:x:0:0:the secret of another file"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By the kind of text encoder and tokenizer, a pipeline's folder."""
    root = tmp_path_factory.mktemp("models")
    bert = small_weights()
    vocab = build_vocab(["a red heart"])
    bert.tokenizer = CaptionTokenizer([*vocab, *(f"x{number}" for number in range(60 - len(vocab)))], 77)
    write_weights(bert, "ppdiffusers", root / "bert")
    clip = small_stable_diffusion("1.x", vocab_size=49408)
    clip.tokenizer = vocabulary_folder("clip")
    write_weights(clip, "diffusers", root / "clip")
    return root


def small_files(folder: Path) -> list[str]:
    found = [*folder.rglob("*.json"), *folder.rglob("*.txt")]
    return sorted(str(path.relative_to(folder)) for path in found if path.name not in ("model_index.json", "README.md"))


def put(path: Path, how: str, outside: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "zeros":
        path.symlink_to("/dev/zero")
    elif how == "link out":
        outside.write_text(SECRET)
        path.symlink_to(outside)
    elif how == "link out of the same":
        outside.write_bytes(content)
        path.symlink_to(outside)
    elif how == "large":
        with open(path, "wb") as file:
            file.truncate(1 << 36)
    else:
        path.write_bytes({"bytes": b"\xff\xfe{", "deep": b"[" * 100_000, "digits": b'{"a": %s}' % (b"9" * 5001)}.get(
            how, how.encode()))  # fmt: skip


HOW = ["fifo", "folder", "zeros", "link out", "link out of the same", "large", "bytes", "deep", "digits", "[]", "7"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["bert", "clip"])
def test_a_small_file_that_is_none(models, tmp_path, kind, how):
    for name in small_files(models / kind):
        folder = tmp_path / "model"
        shutil.copytree(models / kind, folder, copy_function=os.link)
        put(folder / name, how, tmp_path / "outside")
        try:
            weights = open_model(folder).read()
            if weights.tokenizer:
                copy_tokenizer(weights.tokenizer, tmp_path / "out")
                load_tokenizer(weights.tokenizer, 77)
        except PpldmError as error:
            assert "\n" not in str(error) and SECRET not in str(error)
            assert Path(name).name in str(error) or str(folder) in str(error)
        for path in (tmp_path / "out").rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes()
        shutil.rmtree(folder)  # what is not read cannot be wrong
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("kind", ["bert", "clip"])
def test_a_hubs_cache_is_a_folder_of_links(models, tmp_path, kind):
    hub = tmp_path / "models--owner--name"
    (hub / "blobs").mkdir(parents=True)
    for number, file in enumerate(path for path in (models / kind).rglob("*") if path.is_file()):
        blob = hub / "blobs" / f"{number:064x}"
        shutil.copyfile(file, blob)
        link = hub / "snapshots" / "main" / file.relative_to(models / kind)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert ppldm.load(hub / "snapshots" / "main").tokenizer.vocab_size > 10
    (tmp_path / "name").symlink_to(hub / "snapshots" / "main")  # and a folder may be a link itself
    assert ppldm.load(tmp_path / "name").tokenizer.vocab_size > 10


@pytest.mark.parametrize("target", ["../shared.json", "own.json"])
def test_links_within_a_model_are_its_own(models, tmp_path, target):
    shutil.copytree(models / "clip", tmp_path / "model")
    config = tmp_path / "model" / "unet" / "config.json"
    os.replace(config, config.parent / target)
    config.symlink_to(target)
    ppldm.load(tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["unet/config.json", "scheduler/scheduler_config.json", "ppldm.json", "tokenizer/vocab.json"]
)
def test_a_link_out_of_the_model_is_refused(models, tmp_path, name):
    shutil.copytree(models / "clip", tmp_path / "model")
    put(tmp_path / "model" / name, "link out of the same", tmp_path / "elsewhere")
    with pytest.raises(PpldmError, match=f"{name} is a link out of its folder"):
        ppldm.load(tmp_path / "model")


@pytest.mark.parametrize("how", ["fifo", "zeros", "folder", "large"])
def test_weights_that_are_no_file(models, tmp_path, how):
    shutil.copytree(models / "clip", tmp_path / "model")
    (tmp_path / "model" / "ppldm.json").unlink()
    put(tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors", how, tmp_path / "outside")
    with pytest.raises(ModelError):
        ppldm.load(tmp_path / "model")
    for name in ("m.safetensors", "m.ckpt", "m.bin", "m.pdparams"):
        (tmp_path / name).touch()
        put(tmp_path / name, how, tmp_path / "outside")
        with pytest.raises(ModelError):
            read_arrays(tmp_path / name)


@pytest.mark.parametrize("how", ["fifo", "zeros", "large", "deep", "bytes"])
def test_a_yaml_file_or_vocabulary_that_is_none(tmp_path, how):
    for name, read in (("m.yaml", read_yaml), ("vocab.txt", lambda path: load_tokenizer(path, 77))):
        (tmp_path / name).touch()
        put(tmp_path / name, how, tmp_path / "outside")
        with pytest.raises(PpldmError, match=name):
            read(tmp_path / name)


INDEXES = [
    "[]", "7", "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}',
    '{"weight_map": {"a": null}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}',
    '{"weight_map": {"a": {"b": 1}}}', '{"weight_map": {"a": "w.safetensors", "b": 7}}', '{"weight_map": "w"}',
    '{"weight_map": {"a": "../w.safetensors"}}', '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "."}}',
    '{"weight_map": {"a": true}}', "[" * 100_000, '{"weight_map": {"a": "w\\u0000.safetensors"}}',
]  # fmt: skip


@pytest.mark.parametrize("text", INDEXES, ids=lambda text: text[:40])
def test_an_index_of_shards_that_is_none(tmp_path, text):
    write_safetensors(tmp_path / "w.safetensors", {"a": np.zeros(3, "f4")}, "pt")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ModelError, match="index.json"):
        read_component_arrays(tmp_path)
    index.write_text('{"weight_map": {"a": "w.safetensors"}}')
    assert [path.name for path in weight_files(tmp_path)] == ["w.safetensors"]


IDS = [-1, 2**32, 1.5, None, "7", True, [], 49408, 5]


@pytest.mark.parametrize("number", IDS)
@pytest.mark.parametrize("file", ["vocab.json", "added_tokens.json", "added beside words"])
def test_ids_that_cannot_be(tmp_path, file, number):
    if file == "added beside words":
        CaptionTokenizer(build_vocab(["a red heart"]), 77, added=["<x>"]).save(tmp_path / "t")
        path, ids = tmp_path / "t" / "added_tokens.json", {"<x>": number}
    else:
        shutil.copytree(vocabulary_folder("clip"), tmp_path / "t")
        path = tmp_path / "t" / file
        ids = json.loads(path.read_text()) | {"a</w>": number} if file == "vocab.json" else {"<x>": number}
    path.write_text(json.dumps(ids))
    behind = {"added_tokens.json": [49408]}.get(file, [])  # the next id; a smaller one is a token of the vocabulary
    if file != "vocab.json" and number in [-1, 5, *behind]:
        load_tokenizer(tmp_path / "t", 77)
        return
    with pytest.raises(ConfigError, match=path.name):
        load_tokenizer(tmp_path / "t", 77)


def test_very_many_added_tokens_are_refused_at_once(tmp_path):
    shutil.copytree(vocabulary_folder("clip"), tmp_path / "t")
    (tmp_path / "t" / "added_tokens.json").write_text(json.dumps({f"<{n}>": 49408 + n for n in range(100_000)}))
    with pytest.raises(ConfigError, match="adds 100,000 tokens; at most 10,000"):
        load_tokenizer(tmp_path / "t", 77)


@pytest.mark.parametrize("said", ['{"do_lower_case": "false"}', '{"do_lower_case": []}', '{"pad_token": 7}', "[]"])
def test_settings_of_a_tokenizer_have_their_type(tmp_path, said):
    bert = "lower" in said
    if bert:
        CaptionTokenizer(build_vocab(["a red heart"]), 77).save(tmp_path / "t")
    else:
        shutil.copytree(vocabulary_folder("clip"), tmp_path / "t")
        (tmp_path / "t" / "special_tokens_map.json").unlink()
    (tmp_path / "t" / "tokenizer_config.json").write_text(said)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path / "t", 77)
