"""Stable Cascade's networks from the files of others, and back to diffusers, to the bit."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppldm.cli.main import run
from ppldm.config.network_files import CONFIG_DIR
from ppldm.families import base
from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.components import ComponentWeights, from_torch, to_torch
from ppldm.weights.fill import component_of, describe_model, fill_component
from ppldm.weights.formats.files import write_safetensors
from ppldm.weights.layouts.published import modern_names
from ppldm.weights.source import read_component
from ppldm.weights.write import write_cascade

TINY = {"cascade_prior": "cascade_c_tiny", "cascade_decoder": "cascade_b_tiny", "effnet": "effnet_tiny",
        "vqgan": "vqgan_tiny"}  # fmt: skip
STAGES = ["cascade_prior", "cascade_decoder"]


def small(kind: str, seed: int = 3) -> ComponentWeights:
    """A component of the tiny size; nothing of it is zero."""
    config = read_new_config(kind, TINY[kind], "")
    component = component_of(kind, fill_empty(config) if kind == "vqgan" else build_network(kind, config, seed))
    rng = np.random.default_rng(seed)
    for name, array in component.arrays.items():
        drawn = rng.standard_normal(array.shape, np.float32)
        scale = 0.3 if array.ndim < 2 else 1.5 / np.sqrt(array[0].size)
        component.arrays[name] = np.abs(drawn) + 0.5 if name.endswith("_variance") else drawn * np.float32(scale)
    return component


def fill_empty(config):
    from ppdiffusers.pipelines.wuerstchen.modeling_paella_vq_model import PaellaVQModel

    return PaellaVQModel(**config)


def same(ours: ComponentWeights, others: ComponentWeights) -> bool:
    assert ours.config == others.config and ours.arrays.keys() == others.arrays.keys()
    return all(
        array.dtype == others.arrays[name].dtype and (array == others.arrays[name]).all()
        for name, array in ours.arrays.items()
    )


def published_names(arrays: dict) -> dict:
    """Arrays of diffusers as they were published first: attention in one matrix, another name in the decoder."""
    found, is_prior = {}, "clip_txt_mapper.weight" in arrays
    for name, array in arrays.items():
        if ".attention.to_q." in name:
            parts = [arrays[name.replace("to_q", f"to_{one}")] for one in "qkv"]
            found[name.replace("to_q.", "attn.in_proj_")] = np.concatenate(parts)
        elif ".attention.to_out.0." in name:
            found[name.replace("to_out.0", "attn.out_proj")] = array
        elif ".attention.to_" not in name:
            name = name if is_prior else name.replace("clip_txt_pooled_mapper", "clip_mapper")
            found[name] = array
    return found


@pytest.mark.parametrize("kind", TINY)
def test_what_is_written_is_read_again(kind, tmp_path):
    component = small(kind)
    others = {} if kind in STAGES else {"cascade_decoder": small("cascade_decoder")}
    write_cascade({kind: component, **others}, tmp_path / "out", metadata={"global_step": 7})
    assert same(read_component(kind, tmp_path / "out"), component)
    assert json.loads((tmp_path / "out/ppldm.json").read_text())["global_step"] == 7
    layer = fill_component(kind, read_component(kind, tmp_path / "out"))
    assert same(component_of(kind, layer), component)


def test_half_precision_is_written_and_no_stage_is_refused(tmp_path):
    write_cascade({"cascade_prior": small("cascade_prior")}, tmp_path / "out", dtype="float16")
    read = read_component("cascade_prior", tmp_path / "out")
    assert {array.dtype for array in read.arrays.values()} == {np.dtype(np.float16)}
    with pytest.raises(ModelError, match="no prior and no decoder"):
        write_cascade({"vqgan": small("vqgan")}, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", [*STAGES, "effnet"])
def test_single_files_are_known_by_their_sizes(kind, tmp_path):
    component = small(kind)
    theirs = published_names(to_torch(component.arrays))
    write_safetensors(tmp_path / "stage.safetensors", theirs, "pt")
    assert same(read_component(kind, tmp_path / "stage.safetensors"), component)
    (tmp_path / "own.json").write_text(json.dumps(component.config | {"latent_channels": 3, "clip_seq": 2}))
    with pytest.raises(ModelError, match="latent_channels|clip_seq"):
        fill_component(kind, read_component(kind, tmp_path / "stage.safetensors", config_file=tmp_path / "own.json"))


def test_the_export_command_takes_files_and_folders(tmp_path):
    component = small("cascade_decoder")
    write_safetensors(tmp_path / "stage.safetensors", published_names(to_torch(component.arrays)), "pt")
    source = tmp_path / "stage.safetensors"
    for out in ("once", "twice"):
        run(["export", str(source), "--out", str(tmp_path / out), "--to", "diffusers"])
        source = tmp_path / out
        assert same(read_component("cascade_decoder", source), component)
        assert {path.name for path in source.iterdir()} == {"decoder", "scheduler", "model_index.json", "ppldm.json"}
    for path in (source, tmp_path / "stage.safetensors"):
        with pytest.raises(ModelError, match="has one set of weights"):
            run(["export", str(path), "--out", str(tmp_path / "more"), "--to", "diffusers", "--ema"])
    with pytest.raises(ConfigError, match="Stable Cascade is exported with --to diffusers"):
        run(["export", str(source), "--out", str(tmp_path / "more"), "--to", "ppdiffusers"])
    file = source / "decoder/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"0")
    with pytest.raises(ModelError, match="has changed or is cut short"):
        run(["export", str(source), "--out", str(tmp_path / "more"), "--to", "diffusers"])


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in STAGES for name in ("3b", "1b", "700m", "tiny")])
def test_published_sizes_are_told_apart(kind, name, tmp_path):
    from ppldm.weights.layouts.published import _published_config, _sides

    file = CONFIG_DIR / f"cascade_{'c' if kind == 'cascade_prior' else 'b'}_{name}.json"
    if file.is_file():
        config = json.loads(file.read_text())
        arrays = {key: np.zeros(side) for key, side in _sides(config).items()}
        assert _published_config(kind, arrays, tmp_path) == (file, config)
        with pytest.raises(ModelError, match="is no Stable Cascade .* of a size that is known; put its config"):
            _published_config(kind, {key: array[1:] for key, array in arrays.items()}, tmp_path)


class Stage(base.Family):
    name, plural, components = "a_stage", "stages", {"net": "cascade_prior"}


def test_a_checkpoint_is_read_by_kind(tmp_path, monkeypatch):
    monkeypatch.setitem(base._REGISTERED, Stage.name, Stage())
    component = small("cascade_prior")
    layer = fill_component("cascade_prior", component)
    part = SimpleNamespace(layer=layer, trained=True)
    model = SimpleNamespace(components={"net": part}, process_settings=lambda: None, tokenizer=None)
    describe_model(Stage(), model).write(tmp_path)
    (tmp_path / "manifest.json").write_text('{"global_step": 5, "files": {}}')
    whole = {f"net.{name}": value for name, value in layer.state_dict().items()}
    paddle.save(whole, f"{tmp_path}/model_state.pdparams")
    assert same(read_component("cascade_prior", tmp_path), component)
    paddle.save({name: value / 2 for name, value in whole.items()}, f"{tmp_path}/ema_state.pdparams")
    run(["export", str(tmp_path), "--out", str(tmp_path / "out"), "--to", "diffusers", "--ema"])
    average = read_component("cascade_prior", tmp_path, ema=True)
    assert same(read_component("cascade_prior", tmp_path / "out"), average)
    assert all((array * 2 == component.arrays[name]).all() for name, array in average.arrays.items())
    with pytest.raises(ModelError, match="holds no Paella autoencoder"):
        read_component("vqgan", tmp_path)


@pytest.mark.needs("parity")
@pytest.mark.parametrize("kind", STAGES)
def test_plain_diffusers_reads_and_writes_the_same(kind, tmp_path):
    import diffusers

    component = small(kind)
    given = {kind: component, "vqgan": small("vqgan")} if kind == "cascade_decoder" else {kind: component}
    write_cascade(given, tmp_path / "out")
    folder = {"cascade_prior": "prior", "cascade_decoder": "decoder"}[kind]
    theirs = diffusers.StableCascadeUNet.from_pretrained(tmp_path / "out" / folder)
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(read_component(kind, tmp_path / "theirs"), component)
    pipeline = getattr(diffusers, f"StableCascade{folder.capitalize()}Pipeline")
    whole = pipeline.from_pretrained(tmp_path / "out", text_encoder=None, tokenizer=None)
    assert (whole.components[folder].clf[1].weight.detach().numpy() == to_torch(component.arrays)["clf.1.weight"]).all()
    import torch
    from diffusers.loaders.single_file_utils import convert_stable_cascade_unet_single_file_to_diffusers as convert

    published = published_names(to_torch(component.arrays))
    converted = convert({name: torch.tensor(array) for name, array in published.items()})
    ours = modern_names(published)
    assert ours.keys() == converted.keys() and all((converted[key].numpy() == ours[key]).all() for key in ours)


@pytest.mark.needs("parity")
def test_the_autoencoder_gives_what_diffusers_gives(tmp_path):
    import torch
    from diffusers.pipelines.wuerstchen.modeling_paella_vq_model import PaellaVQModel

    component = small("vqgan")
    write_cascade({"vqgan": component, "cascade_decoder": small("cascade_decoder")}, tmp_path / "out")
    theirs = PaellaVQModel.from_pretrained(tmp_path / "out/vqgan").eval()
    theirs.save_pretrained(tmp_path / "theirs", safe_serialization=False)
    read = read_component("vqgan", tmp_path / "theirs")
    assert same(read, component) and from_torch(to_torch(read.arrays)).keys() == read.arrays.keys()
    ours = fill_component("vqgan", read)
    ours.eval()
    rng = np.random.default_rng(1)
    pixels, latents = rng.random([2, 3, 16, 24], np.float32), rng.standard_normal([2, 4, 4, 6], np.float32)
    with torch.no_grad():
        encoded = theirs.down_blocks(theirs.in_block(torch.tensor(pixels)))  # its own `encode` fails in 0.31.0
        decoded = theirs.decode(torch.tensor(latents)).sample
        quantised = theirs.decode(torch.tensor(latents), force_not_quantize=False).sample
    pairs = [
        (ours.encode(paddle.to_tensor(pixels)).latents, encoded),
        (ours.decode(paddle.to_tensor(latents)).sample, decoded),
        (ours.decode(paddle.to_tensor(latents), force_not_quantize=False).sample, quantised),
    ]
    for mine, other in pairs:
        assert mine.shape == list(other.shape) and other.abs().max() > 0.5
        assert np.abs(mine.numpy() - other.numpy()).max() < 1e-4
