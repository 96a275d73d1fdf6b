"""Single files of Stable Diffusion: known by their names and shapes, whatever their layout, type and container."""

import json

import needs
import numpy as np
import pytest
from single_files import single_file_names, small_stable_diffusion, write_single_file
from small_weights import differences, small_weights, write_clip

import ppldm
from ppldm.config.network_files import CONFIG_DIR
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.components import ComponentWeights, Weights, cast, turn_linear
from ppldm.weights.configs import complete_config
from ppldm.weights.fill import parameter_shapes
from ppldm.weights.formats.files import read_arrays
from ppldm.weights.layouts import compvis, single_file
from ppldm.weights.names import rename
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import write_weights

LAYOUTS = ("1.x", "old", "2.x")
SAID = {"2.x": "v_prediction"}


def rounded(weights: Weights, dtype: str) -> Weights:
    """What is read of a file in `dtype`."""
    for component in weights.components.values():
        if dtype == "float16":
            component.arrays = cast(component.arrays, dtype)
        if dtype == "bfloat16":
            import torch

            component.arrays = {n: torch.tensor(a).bfloat16().float().numpy() for n, a in component.arrays.items()}
    return weights


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_by_type_by_container(tmp_path, layout, dtype, suffix):
    if dtype == "bfloat16":
        needs.need("parity")
    weights = small_stable_diffusion(layout)
    path = write_single_file(tmp_path / f"model{suffix}", single_file_names(weights, layout), dtype)
    read = open_model(path, prediction_type=SAID.get(layout)).read()
    assert read.scheduler["prediction_type"] == SAID.get(layout, "epsilon")
    assert read.components["unet"].config["sample_size"] == (96 if layout == "2.x" else 64)
    read.components["unet"].config["sample_size"] = 64
    assert differences(read, rounded(weights, dtype)) == []
    for kind in ("vae", "unet", "text_encoder"):
        read_component(kind, path) if layout != "2.x" or kind != "unet" else None


@pytest.mark.parametrize(
    "said, given, predicts",
    [({}, None, None), ({}, "epsilon", "epsilon"), ({"modelspec.prediction_type": "v"}, None, "v_prediction"),
     ({"modelspec.prediction_type": "epsilon"}, None, "epsilon"), ("v_pred", None, "v_prediction"),
     ({"modelspec.prediction_type": "epsilon"}, "v_prediction", "v_prediction"), ("yaml", None, "v_prediction")],
)  # fmt: skip
def test_what_a_second_one_predicts(tmp_path, said, given, predicts):
    arrays = single_file_names(small_stable_diffusion("2.x"), "2.x")
    if said == "v_pred":
        arrays["v_pred"] = np.zeros(0, np.float32)
    path = write_single_file(tmp_path / "m.safetensors", arrays, metadata=said if isinstance(said, dict) else None)
    if said == "yaml":
        weights = small_stable_diffusion("2.x")
        weights.scheduler["prediction_type"] = predicts
        weights.components["text_encoder"].config = {"encoder_attention_heads": 8, "head_dim": 64, "d_model": 32,
                                                     "encoder_ffn_dim": 128, "encoder_layers": 1,
                                                     "vocab_size": 9, "max_position_embeddings": 77}  # fmt: skip
        weights.components["unet"].config["attention_head_dim"] = 8
        params = compvis.params_of(weights)
        params["cond_stage_config"] = {"target": "ldm.modules.encoders.modules.FrozenOpenCLIPEmbedder"}
        (tmp_path / "m.yaml").write_text(compvis.yaml_text(params))
    if predicts is None:
        with pytest.raises(ModelError, match="does not say what it predicts; add --prediction-type"):
            open_model(path).read()
        assert open_model(path).read(("vae",)).components.keys() == {"vae"}
        return
    read = open_model(path, prediction_type=given).read()
    assert read.scheduler["prediction_type"] == predicts and read.components.keys() == {"vae", "unet", "text_encoder"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_a_file_that_is_made_for_inpainting(tmp_path, layout, suffix):
    weights = small_stable_diffusion(layout, unet={"in_channels": 9})
    path = write_single_file(tmp_path / f"m{suffix}", single_file_names(weights, layout))
    read = open_model(path, prediction_type=SAID.get(layout)).read()
    assert read.components["unet"].config["in_channels"] == 9
    read.components["unet"].config["sample_size"] = 64
    assert differences(read, weights) == []
    write_weights(read, "diffusers", tmp_path / "d")
    assert differences(open_model(tmp_path / "d").read(), read) == []
    index = json.loads((tmp_path / "d" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionInpaintPipeline"
    card = (tmp_path / "d" / "README.md").read_text()
    assert 'image=Image.open("picture.jpg").convert("RGB"), mask_image=Image.open("mask.png")' in card
    with pytest.raises(ModelError, match="the UNet takes a mask"):
        write_weights(small_weights(0, {"in_channels": 9}), "compvis", tmp_path / "c")


def test_averaged_weights_by_choice(tmp_path):
    weights, averaged = small_stable_diffusion("1.x"), small_stable_diffusion("1.x", seed=1)
    arrays, start = single_file_names(weights, "1.x"), "model.diffusion_model."
    for name, array in single_file_names(averaged, "1.x").items():
        if name.startswith(start):
            arrays["model_ema." + name.removeprefix("model.").replace(".", "")] = array
    path = write_single_file(tmp_path / "m.safetensors", arrays)
    assert differences(open_model(path).read(), weights) == []
    weights.components["unet"].arrays = averaged.components["unet"].arrays
    assert differences(open_model(path, ema=True).read(), weights) == []
    plain = write_single_file(tmp_path / "plain.safetensors", single_file_names(weights, "1.x"))
    with pytest.raises(ModelError, match="holds no averaged weights"):
        open_model(plain, ema=True).read()


@pytest.mark.parametrize(
    "change, words",
    [(("model.diffusion_model.input_blocks.0.0.weight", (32, 5, 3, 3)), "takes 5 channels .* depth or editing"),
     (("conditioner.embedders.0.model.ln_final.bias", (3,)), "is a refiner of Stable Diffusion XL, which is not"),
     (("conditioner.embedders.1.model.ln_final.bias", (3,)), "lacks conditioner.embedders.1.model.text_projection"),
     (("model.diffusion_model.joint_blocks.0.x.weight", (3,)), "lacks model.diffusion_model.x_embedder"),
     (("double_blocks.0.img_attn.norm.key_norm.scale", (3,)), "is Flux"),
     (("control_model.time_embed.0.weight", (3,)), "is a ControlNet"),
     (("model.diffusion_model.label_emb.0.0.weight", (3, 3)), "told more than captions"),
     (("first_stage_model.decoder.conv_out.weight", None), "lacks first_stage_model.decoder.conv_out.weight"),
     (("model.diffusion_model.out.2.weight", None), "lacks model.diffusion_model.out.2.weight"),
     (("cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", None), "lacks cond_stage_model"),
     (("model.diffusion_model.odd.weight", (3,)), "holds model.diffusion_model.odd.weight")],
)  # fmt: skip
def test_other_files_are_named(tmp_path, change, words):
    arrays = single_file_names(small_stable_diffusion("1.x"), "1.x")
    name, shape = change
    arrays.pop(name, None)
    if shape:
        arrays[name] = np.zeros(shape, np.float32)
    with pytest.raises(ModelError, match=words):
        open_model(write_single_file(tmp_path / "m.safetensors", arrays)).read()


def test_the_autoencoder_of_a_third_one_is_read(tmp_path):
    """By itself, and of no other number of channels without what says how its latents are scaled."""
    weights, parts = small_weights(), {}
    for channels in (16, 32):
        config = weights.components["vae"].config | {
            "latent_channels": channels, "scaling_factor": 1.5305, "shift_factor": 0.0609, "sample_size": 512,
            "use_quant_conv": False, "use_post_quant_conv": False,
        }  # fmt: skip
        rng, shapes = np.random.default_rng(0), parameter_shapes("vae", config)
        arrays = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
        weights.components["vae"] = ComponentWeights(config, arrays)
        parts[channels] = {n: a for n, a in compvis.join(weights).items() if n.startswith("first_stage_model.")}
        parts[channels] |= {"model.diffusion_model.joint_blocks.0.x.weight": np.zeros(3, "f4")}
        path = write_single_file(tmp_path / f"{channels}.safetensors", parts[channels])
        if channels == 16:
            found = read_component("vae", path)
            assert found.config == config and found.arrays.keys() == arrays.keys()
            assert all((found.arrays[name] == array).all() for name, array in arrays.items())
    with pytest.raises(ModelError, match="has a VAE of 32 channels, and does not say how its latents are scaled"):
        read_component("vae", path)
    with pytest.raises(
        ModelError, match="lacks model.diffusion_model.x_embedder.proj.weight, or has it in another shape"
    ):
        open_model(tmp_path / "16.safetensors").read()


def test_a_lora_is_no_model(tmp_path):
    path = tmp_path / "lora.safetensors"
    write_single_file(path, {"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": np.zeros((4, 3), "f4")})
    with pytest.raises(ModelError, match=r"lora.safetensors is a LoRA; give its base model"):
        ppldm.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1.x", "2.x"])
def test_a_file_draws_by_itself(tmp_path, layout):
    """Its tokenizer is in the package; another may be named; what is drawn is what the folder of its weights draws."""
    weights = small_stable_diffusion(layout, vocab_size=49408)
    weights.scheduler["prediction_type"] = SAID.get(layout, "epsilon")
    path = write_single_file(tmp_path / "m.safetensors", single_file_names(weights, layout))
    model = ppldm.load(path, prediction_type=SAID.get(layout))
    assert model.resolution == (768 if layout == "2.x" else 512)
    few = {"num_inference_steps": 2, "height": 32, "width": 32}
    drawn = np.asarray(model.generate("a red heart", **few))
    weights.tokenizer = open_model(path).tokenizer
    write_weights(weights, "diffusers", tmp_path / "d")
    assert (drawn == np.asarray(ppldm.load(tmp_path / "d").generate("a red heart", **few))).all()
    with pytest.raises((ModelError, ConfigError), match="no tokenizer"):
        ppldm.load(path, prediction_type="epsilon", tokenizer=str(tmp_path / "none"))


def test_the_tokenizer_of_a_file(tmp_path):
    for layout, pad in (("1.x", 49407), ("2.x", 0)):
        path = write_single_file(tmp_path / "m.safetensors", single_file_names(small_stable_diffusion(layout), layout))
        ids = load_tokenizer(open_model(path).tokenizer, 77).encode(["a photo of an astronaut riding a horse"])[0]
        # As published: https://huggingface.co/openai/clip-vit-large-patch14
        assert ids[:10].tolist() == [49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 49407]
        assert set(ids[10:].tolist()) == {pad}
    write_clip(tmp_path / "own")
    assert open_model(tmp_path / "own" / "text_encoder").tokenizer == tmp_path / "own" / "tokenizer"


PUBLISHED = {  # parameters of UNet, VAE and the layers of the text encoder that are used
    "1.x": (("unet_sd1", 859_520_964), ("vae_kl_f8", 83_653_863), ("clip_vit_l", 123_060_480)),
    "2.x": (("unet_sd2", 865_910_724), ("vae_kl_f8", 83_653_863), ("clip_vit_h", 340_387_840)),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_published_sizes_key_by_key(layout, monkeypatch):
    """All names and shapes of the published single files, with arrays that take no memory: they make the configs of
    this package, and every weight of its networks has its place."""
    weights = Weights(scheduler=small_stable_diffusion("1.x").scheduler)
    monkeypatch.setattr(
        "single_files.np.concatenate", lambda parts: _none((3 * parts[0].shape[0], *parts[0].shape[1:]))
    )
    monkeypatch.setattr("single_files.WIDTH", 1024)
    monkeypatch.setattr("single_files.np.random.default_rng", lambda seed: _Zeros())
    expected = {}
    for kind, (name, count) in zip(("unet", "vae", "text_encoder"), PUBLISHED[layout], strict=True):
        config = complete_config(kind, json.loads((CONFIG_DIR / f"{name}.json").read_text()), name)
        expected[kind] = config
        shapes = parameter_shapes(kind, config)
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == count
        weights.components[kind] = type(
            "Component", (), {"config": config, "arrays": {n: _none(s) for n, s in shapes.items()}}
        )
    arrays = single_file_names(weights, layout)
    # All but the tables of the noise schedule and, of 1.x, one of positions: as the published files have them.
    assert sum(name.startswith("model.diffusion_model.") for name in arrays) == 686
    assert sum(name.startswith("first_stage_model.") for name in arrays) == 248
    assert sum(name.startswith("cond_stage_model.") for name in arrays) == {"1.x": 197, "2.x": 24 * 12 + 6}[layout]
    configs = single_file.configs_by_shapes(arrays, layout)
    for kind, config in configs.items():
        found = complete_config(kind, config, layout)
        different = {key for key in found if found[key] != expected[kind][key]}
        assert different <= ({"sample_size", "scaling_factor"} if kind == "vae" else set())
    components = compvis.split(arrays, {kind: configs[kind] for kind in ("unet", "vae")}, layout, False)
    found = {kind: component.arrays for kind, component in components.items()}
    found["text_encoder"] = turn_linear(single_file.text_encoder_arrays(arrays))
    for kind, component in weights.components.items():
        assert {n: a.shape for n, a in found[kind].items()} == {n: a.shape for n, a in component.arrays.items()}
    assert rename("conv_in.weight", {"conv_in": "x"}) == "x.weight"


def _none(shape) -> np.ndarray:
    return np.broadcast_to(np.float32(0), tuple(shape))


class _Zeros:
    def standard_normal(self, shape, dtype=None):
        return _none(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_the_text_encoder_are_those_of_diffusers(layout):
    needs.need("parity")
    import torch
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint

    weights = small_stable_diffusion(layout)
    state = {name: torch.tensor(np.ascontiguousarray(a)) for name, a in single_file_names(weights, layout).items()}
    if layout == "2.x":
        config = type("Config", (), {"projection_dim": 32})
        state.pop("cond_stage_model.model.text_projection")  # it would be taken for the width
        theirs = convert_open_clip_checkpoint(type("Model", (), {"config": config}), state)
        theirs = {name: value for name, value in theirs.items() if ".layers.2." not in name}
    else:
        theirs = convert_ldm_clip_checkpoint(state)
        start = "" if layout == "1.x" else "text_model."
        theirs = {f"{start}{name}": value for name, value in theirs.items() if "position_ids" not in name}
    ours = turn_linear(weights.components["text_encoder"].arrays)
    assert theirs.keys() == ours.keys()
    assert all((value.numpy() == ours[name]).all() for name, value in theirs.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_alone_are_read_where_they_are_asked_for(tmp_path, layout):
    weights, start = small_stable_diffusion(layout), "model.diffusion_model."
    arrays = {
        "model_ema." + name.removeprefix("model.").replace(".", "") if name.startswith(start) else name: array
        for name, array in single_file_names(weights, layout).items()
    } | {"model_ema.decay": np.zeros([], "f4"), "model_ema.num_updates": np.zeros([], "i4")}
    path = write_single_file(tmp_path / "m.safetensors", arrays)
    read = open_model(path, ema=True, prediction_type=SAID.get(layout)).read()
    read.components["unet"].config["sample_size"] = 64
    assert differences(read, weights) == []
    with pytest.raises(ModelError, match="holds only averaged weights of its UNet; take them: --ema"):
        ppldm.load(path)
    assert open_model(path).read(("vae",)).components.keys() == {"vae"}


@pytest.mark.parametrize("size", ["unet", "unet_12", "unet_tiny"])
def test_dots_of_every_name_of_a_unet(size):
    config = complete_config("unet", json.loads((CONFIG_DIR / f"{size}.json").read_text()), size)
    for name in parameter_shapes("unet", config):
        theirs = rename(name, compvis.NAMES["unet"](config))
        assert compvis._with_dots(theirs.replace(".", "")) == theirs


@pytest.mark.parametrize("layout", ["1.x", "old"])
@pytest.mark.parametrize("extra", ["text_projection.weight", "logit_scale", "vision_model.post_layernorm.weight"])
def test_what_a_clip_has_besides_is_no_reason_to_refuse_it(tmp_path, layout, extra):
    weights = small_stable_diffusion(layout)
    arrays = single_file_names(weights, layout) | {f"cond_stage_model.transformer.{extra}": np.zeros((4, 4), "f4")}
    read = open_model(write_single_file(tmp_path / "m.safetensors", arrays)).read()
    assert differences(read, weights) == []


@pytest.mark.parametrize("missing", ["cond_stage_model.", "first_stage_model.", "model.diffusion_model."])
def test_a_file_without_a_component_is_said_to_lack_it(tmp_path, missing):
    arrays = single_file_names(small_stable_diffusion("1.x"), "1.x")
    kept = {name: array for name, array in arrays.items() if not name.startswith(missing)}
    what = {"cond": "text encoder", "firs": "VAE", "mode": "UNet"}[missing[:4]]
    with pytest.raises(ModelError, match=f"has no {what}"):
        ppldm.load(write_single_file(tmp_path / "m.safetensors", kept))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_read_to_the_bit(tmp_path, kind):
    needs.need("parity")
    import torch
    from safetensors.torch import save_file

    stored = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind)).reshape(16, 16)
    save_file({"a": stored, "b": torch.ones(3)}, tmp_path / "m.safetensors")
    found = read_arrays(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(found["a"], stored.float().numpy())
    assert found["b"].tolist() == [1, 1, 1]


def test_a_type_that_is_not_known_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x7f" * 4)
    with pytest.raises(ModelError, match="a has the type F8_E8M0|damaged"):
        read_arrays(tmp_path / "m.safetensors")
