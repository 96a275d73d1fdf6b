"""A folder of diffusers in each variant that it writes: half precision, shards, pickles, several beside another."""

import json
import shutil
import sys
from pathlib import Path

import needs
import pytest
from small_weights import differences, small_weights, write_clip

import ppldm
from ppldm.utils.errors import ModelError
from ppldm.weights.components import cast
from ppldm.weights.formats.files import weight_files
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import write_weights

VARIANTS = [(variant, safe, sharded) for variant in (None, "fp16") for safe in (True, False) for sharded in (0, 1)]
FEW = {"num_inference_steps": 2, "size": (32, 32)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """VAE, UNet and CLIP in float32, as diffusers has them."""
    folder = tmp_path_factory.mktemp("plain")
    write_clip(folder)
    weights = small_weights(4)
    weights.components["text_encoder"] = read_component("text_encoder", folder / "text_encoder")
    weights.tokenizer = folder / "tokenizer"
    write_weights(weights, "diffusers", folder / "model")
    return folder / "model"


def add_variant(plain: Path, target: Path, variant: str | None, safe: bool, sharded: bool) -> Path:
    """What diffusers and transformers write of the weights of `plain`, into `target`, which may have others."""
    needs.need("parity")
    import diffusers
    import transformers

    shutil.copytree(plain, target, ignore=shutil.ignore_patterns("*.safetensors", "ppldm.json"), dirs_exist_ok=True)
    classes = {"unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL,
               "text_encoder": transformers.CLIPTextModel}  # fmt: skip
    for name, kind in classes.items():
        model = kind.from_pretrained(plain / name)
        model = model.half() if variant else model
        size = "60KB" if sharded else "1GB"
        model.save_pretrained(target / name, variant=variant, safe_serialization=safe, max_shard_size=size)
    return target


@pytest.mark.parametrize("variant, safe, sharded", VARIANTS)
def test_each_holds_the_same_weights(plain, tmp_path, monkeypatch, variant, safe, sharded):
    folder = add_variant(plain, tmp_path / "m", variant, safe, sharded)
    files = [weight_files(folder / name) for name in ("unet", "vae", "text_encoder")]
    assert all((len(own) > 1) == sharded for own in files)
    suffix = ".safetensors" if safe else ".bin"
    assert all(file.suffix == suffix and ("fp16" in file.name) == bool(variant) for own in files for file in own)
    expected = open_model(plain).read()
    if variant:
        for component in expected.components.values():
            component.arrays = cast(component.arrays, "float16")
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch is an error
    assert differences(open_model(folder).read(), expected) == []


def test_each_draws_the_same(plain, tmp_path):
    drawn = ppldm.load(plain).generate("red blue", **FEW)
    sharded = add_variant(plain, tmp_path / "sharded", None, safe=False, sharded=True)
    assert (ppldm.load(sharded).generate("red blue", **FEW) == drawn).all()
    half = add_variant(plain, tmp_path / "half", "fp16", safe=True, sharded=True)
    weights = open_model(plain).read()
    write_weights(weights, "diffusers", tmp_path / "cast", dtype="float16")
    pictures = [ppldm.load(one).generate("red blue", **FEW) for one in (half, tmp_path / "cast")]
    assert (pictures[0] == pictures[1]).all()


def test_full_precision_wins(plain, tmp_path):
    folder = tmp_path / "m"
    for variant, safe, sharded in (("fp16", True, False), ("fp16", False, True), (None, False, True)):
        add_variant(plain, folder, variant, safe, sharded)
    assert {file.suffix for file in weight_files(folder / "unet")} == {".bin"}
    assert differences(open_model(folder).read(), open_model(plain).read()) == []
    add_variant(plain, folder, None, safe=True, sharded=False)
    assert [file.name for file in weight_files(folder / "unet")] == ["diffusion_pytorch_model.safetensors"]


def names_in(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_which_file_of_many(tmp_path):
    first, second = "model.fp16.safetensors", "model.fp32.safetensors"
    for number, (names, chosen) in enumerate((
        ((first, second), second),
        ((first, "model.bf16.safetensors", "pytorch_model.fp16.bin"), first),
        ((first, "model.non_ema.safetensors"), first),
        (("model.non_ema.safetensors",), "model.non_ema.safetensors"),
        (("pytorch_model.bin", first), "pytorch_model.bin"),
    )):  # fmt: skip
        folder = names_in(tmp_path / str(number), *names)
        assert weight_files(folder) == [folder / chosen]
    half, other = "model.fp16-00001-of-00001.safetensors", "model.ema-00001-of-00001.safetensors"
    folder = names_in(tmp_path / "indexes", half, other)
    (folder / "model.safetensors.index.ema.json").write_text(json.dumps({"weight_map": {"a": other}}))
    assert weight_files(folder) == [folder / other]
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": {"a": half}}))
    assert weight_files(folder) == [folder / half]
    folder = names_in(tmp_path / "two", "model.ema.safetensors", "model.non_ema.safetensors")
    with pytest.raises(ModelError, match="has several weight files .*; keep the one that is meant"):
        weight_files(folder)
    folder = names_in(tmp_path / "cut", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"has shards \(model-00001-of-00002.*\) without their index.*; copy that too"):
        weight_files(folder)
