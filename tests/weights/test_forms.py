"""Every form in and out: nothing changes by a bit, and what is wrong is named before anything is built."""

import functools
import json
import shutil

import numpy as np
import paddle
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from small_weights import CONFIGS, differences, small_weights

from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.diffusion.process import Process
from ppldm.families.ldm_build import build_model, weights_of
from ppldm.utils.errors import ModelError
from ppldm.weights.components import ComponentWeights, is_linear_weight
from ppldm.weights.configs import complete_config
from ppldm.weights.fill import fill_component
from ppldm.weights.formats.torch_files import read_torch, write_torch
from ppldm.weights.layouts import compvis
from ppldm.weights.layouts.older import old_text_encoder_names
from ppldm.weights.model_file import read_model_file
from ppldm.weights.names import rename, unet_names, vae_names
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import metadata_of, write_weights


@pytest.fixture(scope="module")
def weights():
    return small_weights(prediction_type="v_prediction")


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for form in ("ppdiffusers", "diffusers", "compvis"):
        write_weights(weights, form, folder / form)
    return folder


def test_linear_weights_are_those_of_linear_layers(weights):
    model = build_model(weights, "small")
    for kind in ("vae", "text_encoder", "unet"):
        layer = getattr(model, kind)
        linear = {f"{name}.weight" for name, one in layer.named_sublayers() if isinstance(one, paddle.nn.Linear)}
        arrays = weights.components[kind].arrays
        assert {name for name, array in arrays.items() if is_linear_weight(name, array)} == linear


def test_a_built_model_gives_its_weights_back(weights):
    assert differences(weights_of(build_model(weights, "small")), weights) == []


@pytest.mark.parametrize("form, path", [("ppdiffusers", ""), ("diffusers", ""), ("compvis", "model.ckpt")])
def test_every_form_is_read_as_it_was_written(weights, exported, form, path):
    again = open_model(exported / form / path).read()
    assert differences(weights, again) == []
    assert again.scheduler["prediction_type"] == "v_prediction"


def test_ppdiffusers_to_diffusers_and_back(exported, tmp_path):
    write_weights(open_model(exported / "ppdiffusers").read(), "diffusers", tmp_path / "d")
    write_weights(open_model(tmp_path / "d").read(), "ppdiffusers", tmp_path / "p")
    for name in ("vqvae", "unet", "bert"):
        first, last = (
            json.loads((path / name / "config.json").read_text()) for path in (exported / "ppdiffusers", tmp_path / "p")
        )
        assert first == last
    scheduler = "scheduler/scheduler_config.json"
    assert (exported / "ppdiffusers" / scheduler).read_text() == (tmp_path / "p" / scheduler).read_text()
    assert differences(open_model(exported / "ppdiffusers").read(), open_model(tmp_path / "p").read()) == []


def test_an_export_for_compvis_keeps_what_is_known_of_the_training(tmp_path):
    weights = small_weights()
    weights.metadata = {"resolution": 48, "global_step": 7, "samples_seen": 56}
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    write_weights(weights, "compvis", tmp_path / "c")
    for path in (tmp_path / "c", tmp_path / "c" / "model.ckpt"):
        again = open_model(path).read()
        assert again.metadata.items() >= weights.metadata.items() and "files" not in again.metadata
        assert again.tokenizer == tmp_path / "c" / "tokenizer"
    assert differences_of(read_component("vae", tmp_path / "c"), weights.components["vae"])


@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers", "compvis"])
@pytest.mark.parametrize("resolution, side", [(48, 6), (64, 8), (68, 8), ("48", 8), (None, 8)])
def test_what_a_library_draws_unasked_is_of_the_size_that_was_trained(tmp_path, form, resolution, side):
    """Of what is no size, or no whole number of latents, nothing is said."""
    weights = small_weights()
    if resolution:
        weights.metadata = {"resolution": resolution}
    write_weights(weights, form, tmp_path / "out")
    again = open_model(tmp_path / "out").read().components
    assert weights.components["unet"].config["sample_size"] == 8 and again["unet"].config["sample_size"] == side
    assert weights.components["vae"].config["sample_size"] == again["vae"].config["sample_size"] == 64


def test_compvis_to_ours_and_back(exported, tmp_path):
    first = exported / "compvis"
    write_weights(open_model(first / "model.ckpt").read(), "ppdiffusers", tmp_path / "p")
    write_weights(open_model(tmp_path / "p").read(), "compvis", tmp_path / "c")
    one, other = read_torch(first / "model.ckpt"), read_torch(tmp_path / "c" / "model.ckpt")
    assert list(one) == list(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert (first / "model.yaml").read_text() == (tmp_path / "c" / "model.yaml").read_text()


@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers"])
def test_half_precision_and_safetensors(weights, tmp_path, form):
    write_weights(weights, form, tmp_path / "half", "float16", safetensors=True)
    again = open_model(tmp_path / "half").read()
    assert not list((tmp_path / "half").rglob("*.pdparams"))
    for kind, component in weights.components.items():
        for name, array in component.arrays.items():
            assert (again.components[kind].arrays[name] == array.astype(np.float16)).all()


def test_published_yaml_configs():
    """The 1.4 B model's YAML, in CompVis' own words, is our published size."""
    params = {
        "linear_start": 0.00085, "linear_end": 0.012, "timesteps": 1000, "scale_factor": 0.18215,
        "unet_config": {"params": {
            "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": 2,
            "attention_resolutions": [4, 2, 1], "channel_mult": [1, 2, 4, 4], "num_heads": 8,
            "use_spatial_transformer": True, "transformer_depth": 1, "context_dim": 1280, "legacy": False}},
        "first_stage_config": {"params": {"embed_dim": 4, "ddconfig": {
            "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
            "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}}},
        "cond_stage_config": {"target": "ldm.modules.encoders.modules.BERTEmbedder",
                              "params": {"n_embed": 1280, "n_layer": 32}},
    }  # fmt: skip
    from ppldm.config.network_files import CONFIG_DIR

    configs = compvis.configs_of(params, "yaml")
    for kind, name in (("unet", "unet.json"), ("vae", "vae_kl_f8.json"), ("text_encoder", "ldmbert.json")):
        ours = complete_config(kind, json.loads((CONFIG_DIR / name).read_text()), name)
        assert complete_config(kind, configs[kind], "yaml") == ours
    assert compvis.scheduler_of(params, "yaml")["prediction_type"] == "epsilon"
    for name, value in (("parameterization", "x0"), ("beta_schedule", "cosine"), ("parameterization", ["eps"])):
        with pytest.raises(ModelError, match=f"yaml: {name} .* is not supported"):
            compvis.scheduler_of(params | {name: value}, "yaml")


def test_names_of_compvis():
    unet = complete_config("unet", CONFIGS["unet"], "")
    assert rename("up_blocks.0.upsamplers.0.conv.weight", unet_names(unet)) == "output_blocks.1.1.conv.weight"
    assert rename("up_blocks.1.upsamplers.0.conv.weight", unet_names(unet)) == "output_blocks.3.2.conv.weight"
    assert rename("down_blocks.1.attentions.0.norm.bias", unet_names(unet)) == "input_blocks.3.1.norm.bias"
    vae = complete_config("vae", CONFIGS["vae"], "")
    assert rename("decoder.up_blocks.0.resnets.1.conv1.bias", vae_names(vae)) == "decoder.up.3.block.1.conv1.bias"


@pytest.mark.parametrize("heads", [4, [1, 2, 2]])
@pytest.mark.parametrize("linear", [False, True])
def test_compvis_unets_of_stable_diffusion(tmp_path, heads, linear):
    """2.x has heads of one width and Linear projections."""
    weights = small_weights(unet={"attention_head_dim": heads, "use_linear_projection": linear})
    write_weights(weights, "compvis", tmp_path / "c")
    assert differences(open_model(tmp_path / "c" / "model.ckpt").read(), weights) == []


@pytest.mark.parametrize(
    "path, value",
    [
        ("model.params", 3),
        ("model.params.unet_config.params", "x"),
        ("model.params.unet_config.params.model_channels", None),
        ("model.params.first_stage_config.params.ddconfig", "x"),
        ("model.params.cond_stage_config.params", None),
        ("model.params.linear_start", "x"),
    ],
)
def test_a_yaml_file_of_no_model_is_named(exported, tmp_path, path, value):
    tree = yaml.safe_load((exported / "compvis" / "model.yaml").read_text())
    *parents, last = path.split(".")
    functools.reduce(dict.__getitem__, parents, tree)[last] = value
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ModelError, match=r"other\.yaml"):
        open_model(exported / "compvis" / "model.ckpt", config_file=tmp_path / "other.yaml").read()


def test_averaged_weights_of_a_ckpt(exported, tmp_path):
    path = tmp_path / "model.ckpt"
    shutil.copy(exported / "compvis" / "model.yaml", tmp_path)
    state = read_torch(exported / "compvis" / "model.ckpt")
    prefix = "model.diffusion_model."
    averaged = {
        "model_ema." + name.removeprefix("model.").replace(".", ""): array + 1
        for name, array in state.items()
        if name.startswith(prefix)
    }
    write_torch(path, state | averaged | {"model_ema.num_updates": np.array(7)}, {})
    raw, mean = open_model(path).read(), open_model(path, ema=True).read()
    for name, array in raw.components["unet"].arrays.items():
        assert (mean.components["unet"].arrays[name] == array + 1).all()
    assert (mean.components["vae"].arrays["quant_conv.bias"] == raw.components["vae"].arrays["quant_conv.bias"]).all()
    with pytest.raises(ModelError, match="holds no averaged weights"):
        open_model(exported / "compvis" / "model.ckpt", ema=True).read()
    with pytest.raises(ModelError, match="has one set of weights"):
        open_model(exported / "ppdiffusers", ema=True).read()


def test_older_layouts_and_names(weights, exported, tmp_path):
    shutil.copytree(exported / "diffusers", tmp_path / "old")
    (tmp_path / "old" / "ppldm.json").unlink()
    (tmp_path / "old" / "bert").rename(tmp_path / "old" / "ldmbert")
    config = json.loads((tmp_path / "old" / "ldmbert" / "config.json").read_text())
    (tmp_path / "old" / "ldmbert" / "config.json").unlink()
    (tmp_path / "old" / "ldmbert" / "model_config.json").write_text(
        json.dumps({"init_args": [config | {"init_class": "LDMBertModel"}], "init_class": "LDMBertModel"})
    )
    file = tmp_path / "old" / "vqvae" / "diffusion_pytorch_model.safetensors"
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    arrays = {}
    for name, array in load_file(file).items():
        for new, old in older.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        arrays[name] = array
    save_file(arrays, file, metadata={"format": "pt"})
    assert differences(open_model(tmp_path / "old").read(), weights) == []


def test_the_text_encoder_of_the_older_layout(weights, tmp_path):
    """ldmbert/ of the older training scripts: names of an encoder of Paddle, no to_logits."""
    import pickle

    component = weights.components["text_encoder"]
    names = old_text_encoder_names(component.config)
    arrays = {rename(name, names): a for name, a in component.arrays.items() if not name.startswith("to_logits")}
    assert "encoder.layers.1.linear2.weight" in arrays and "encoder.layers.0.self_attn.out_proj.bias" in arrays
    (tmp_path / "ldmbert").mkdir()
    (tmp_path / "ldmbert" / "model_config.json").write_text(
        json.dumps(component.config | {"init_class": "LDMBertModel"})
    )
    (tmp_path / "ldmbert" / "model_state.pdparams").write_bytes(pickle.dumps(arrays, protocol=2))
    read = open_model(tmp_path).read(("text_encoder",)).components["text_encoder"]
    assert read.config == component.config and read.arrays.keys() == component.arrays.keys()
    for name, array in component.arrays.items():
        assert (read.arrays[name] == (0 if name.startswith("to_logits") else array)).all()
    fill_component("text_encoder", read)


def test_single_parts(exported, weights):
    assert differences_of(read_component("vae", exported / "diffusers" / "vqvae"), weights.components["vae"])
    assert differences_of(read_component("unet", exported / "ppdiffusers"), weights.components["unet"])
    assert differences_of(read_component("unet", exported / "compvis" / "model.ckpt"), weights.components["unet"])


def differences_of(one: ComponentWeights, other: ComponentWeights) -> bool:
    return one.config == other.config and all((one.arrays[n] == other.arrays[n]).all() for n in other.arrays)


def test_shards(exported, weights, tmp_path):
    shutil.copytree(exported / "diffusers", tmp_path / "s")
    file = tmp_path / "s" / "unet" / "diffusion_pytorch_model.safetensors"
    arrays = load_file(file)
    names = sorted(arrays)
    components = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for component, own in components.items():
        save_file({name: arrays[name] for name in own}, file.parent / component, metadata={"format": "pt"})
    file.unlink()
    index = file.with_name(file.name + ".index.json")
    index.write_text(
        json.dumps({"weight_map": {name: component for component, own in components.items() for name in own}})
    )
    assert differences(open_model(tmp_path / "s").read(), weights) == []
    index.rename(index.with_name(file.name + ".index.fp16.json"))
    assert differences(open_model(tmp_path / "s").read(), weights) == []
    (file.parent / "two.safetensors").unlink()
    with pytest.raises(ModelError, match="names two.safetensors, which is not there"):
        open_model(tmp_path / "s").read()


def test_keys_that_do_not_fit_are_listed(weights):
    component = weights.components["unet"]
    arrays = dict(component.arrays)
    del arrays["conv_in.bias"]
    arrays["conv_of.bias"] = np.zeros(3, "f4")
    arrays["conv_out.weight"] = arrays["conv_out.weight"][:, :3]
    with pytest.raises(ModelError) as raised:
        fill_component("unet", ComponentWeights(component.config, arrays, "here"))
    message = str(raised.value)
    assert "here" in message and "1 missing: conv_in.bias" in message and "1 unexpected: conv_of.bias" in message
    assert "conv_out.weight [4, 3, 3, 3] instead of [4, 32, 3, 3]" in message


def test_truncated_files_and_other_things_are_named(exported, tmp_path):
    shutil.copytree(exported / "diffusers", tmp_path / "cut")
    file = tmp_path / "cut" / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="diffusion_pytorch_model.safetensors is damaged, cut short"):
        open_model(tmp_path / "cut").read()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    with pytest.raises(ModelError, match="pictures has no .*: it is no pipeline or checkpoint; name one"):
        open_model(tmp_path / "pictures").read()
    (tmp_path / "text.ckpt").write_text("hello, this is no model")
    with pytest.raises(ModelError, match="text.ckpt is not a file of weights"):
        open_model(tmp_path / "text.ckpt").read()
    write_torch(tmp_path / "other.ckpt", {"net.w": np.zeros(3, "f4")}, {})
    with pytest.raises(ModelError, match="not a latent diffusion model of CompVis"):
        open_model(tmp_path / "other.ckpt").read()


@pytest.mark.parametrize("form, name", [("ppdiffusers", "model_state.pdparams"),
                                        ("diffusers", "diffusion_pytorch_model.safetensors")])  # fmt: skip
def test_a_changed_bit_of_an_export_is_noticed(exported, weights, tmp_path, form, name):
    shutil.copytree(exported / form, tmp_path / "p")
    file = tmp_path / "p" / "unet" / name
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=f"unet/{name} has changed or is cut short"):
        open_model(tmp_path / "p").read()
    assert differences_of(read_component("vae", tmp_path / "p"), weights.components["vae"])
    metadata = json.loads((tmp_path / "p" / "ppldm.json").read_text())
    del metadata["files"][f"unet/{name}"]
    (tmp_path / "p" / "ppldm.json").write_text(json.dumps(metadata))
    assert "files" not in open_model(tmp_path / "p").read().metadata


def test_a_ckpt_of_another_config_is_refused(exported, tmp_path):
    shutil.copy(exported / "compvis" / "model.ckpt", tmp_path)
    with pytest.raises(ModelError, match=r"model\.ckpt"):
        fill_component("unet", open_model(tmp_path / "model.ckpt").read().components["unet"])


def test_settings_that_a_library_lacks_are_refused():
    with pytest.raises(ModelError, match="data_format 'NHWC' makes a network that diffusers does not have"):
        from ppldm.weights.components import to_torch_config

        to_torch_config("unet", {"data_format": "NHWC"}, "x")
    with pytest.raises(ModelError, match="mid_block_add_attention False"):
        complete_config("vae", CONFIGS["vae"] | {"mid_block_add_attention": False}, "x")
    with pytest.raises(ModelError, match="no setting 'chanels'"):
        complete_config("vae", {"chanels": 3}, "x")
    with pytest.raises(ModelError, match="CompVis' classes cannot build this model: the UNet's norm_num_groups"):
        weights = small_weights(unet={"norm_num_groups": 16})
        compvis.params_of(weights)


ODD_SETTINGS = [
    ("unet/config.json", "act_fn", ["silu"]),
    ("unet/config.json", "cross_attention_dim", {}),
    ("unet/config.json", "time_embedding_dim", -1),
    ("unet/config.json", "norm_eps", None),
    ("unet/config.json", "norm_num_groups", "x"),
    ("unet/config.json", "norm_num_groups", 24),
    ("vqvae/config.json", "norm_num_groups", []),
    ("unet/config.json", "down_block_types", 3),
    ("vqvae/config.json", "scaling_factor", [1]),
    ("vqvae/config.json", "up_block_out_channels", {}),
    ("bert/config.json", "dropout", None),
    ("bert/config.json", "dropout", 1.5),
    ("bert/config.json", "encoder_layerdrop", -1),
    ("bert/config.json", "activation_function", True),
    ("bert/config.json", "head_dim", -1),
    ("scheduler/scheduler_config.json", "prediction_type", "score"),
    ("scheduler/scheduler_config.json", "beta_schedule", "sigmoid"),
    ("scheduler/scheduler_config.json", "timestep_shift", 0),
    ("scheduler/scheduler_config.json", "trained_betas", [0.1, 0.2]),
    ("scheduler/scheduler_config.json", "beta_start", None),
    ("scheduler/scheduler_config.json", "beta_end", 1.5),
    ("scheduler/scheduler_config.json", "num_train_timesteps", 1.5),
]


@pytest.mark.parametrize("file, key, value", ODD_SETTINGS)
def test_settings_that_no_model_can_have_name_their_file(exported, tmp_path, file, key, value):
    shutil.copytree(exported / "ppdiffusers", tmp_path / "p")
    path = tmp_path / "p" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=str(path.parent)):
        build_model(open_model(tmp_path / "p").read(), "p")


def test_a_unet_that_does_not_say_its_size_has_that_of_the_vae(exported):
    weights = open_model(exported / "ppdiffusers").read()
    weights.components["unet"].config["sample_size"] = None
    assert metadata_of(weights)["resolution"] == CONFIGS["vae"]["sample_size"]


def test_exports_need_everything(weights, tmp_path):
    from dataclasses import replace

    half = replace(weights, components={"vae": weights.components["vae"]})
    with pytest.raises(ModelError, match="no unet and no text_encoder to export"):
        write_weights(half, "diffusers", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_stable_diffusions_vae_and_unet_are_starting_points(tiny, tmp_path):
    """A pipeline and a .ckpt with another text encoder: its VAE and UNet start a model with an LDMBert."""
    from ppldm.families.ldm import LdmConfig
    from ppldm.families.ldm_build import build_ldm

    weights = small_weights(3)
    write_weights(weights, "diffusers", tmp_path / "sd")
    write_weights(weights, "compvis", tmp_path / "c")
    (tmp_path / "sd" / "vqvae").rename(tmp_path / "sd" / "vae")
    shutil.rmtree(tmp_path / "sd" / "bert")
    (tmp_path / "sd" / "text_encoder").mkdir()
    (tmp_path / "sd" / "text_encoder" / "config.json").write_text(
        '{"architectures": ["CLIPTextModel"], "hidden_size": 32}'
    )
    params = compvis.read_yaml(tmp_path / "c" / "model.yaml")
    params["cond_stage_config"] = {"target": "ldm.modules.encoders.modules.FrozenCLIPEmbedder"}
    (tmp_path / "c" / "model.yaml").write_text(compvis.yaml_text(params))
    for start in (tmp_path / "sd", tmp_path / "c" / "model.ckpt"):
        arguments = LdmConfig(
            vae_name_or_path=str(start), unet_name_or_path=str(start), model_max_length=12, offline=True,
            text_encoder_config_file=tiny.config("ldmbert"),
        )  # fmt: skip
        model = build_ldm(arguments, 100, seed=0)
        for kind in ("vae", "unet"):
            for name, value in getattr(model, kind).state_dict().items():
                assert (value.numpy() == weights.components[kind].arrays[name]).all()
        assert model.latent_map.scale == 0.3
        with pytest.raises(ModelError, match="text_encoder|text encoder"):
            build_ldm(LdmConfig(model_name_or_path=str(start), model_max_length=12), 100, seed=0)


def test_a_ckpt_without_yaml_is_the_published_size_of_its_depth(tmp_path):
    names = {f"cond_stage_model.transformer.attn_layers.layers.{n}.0.weight" for n in range(64)}
    for depth, width in ((32, 1280), (12, 768)):
        own = {name for name in names if int(name.split(".")[4]) < 2 * depth}
        _, configs, _ = compvis._described(tmp_path / "a.ckpt", None, own)
        assert configs["text_encoder"].items() >= {
            "d_model": width, "encoder_layers": depth, "vocab_size": 30522, "max_position_embeddings": 77
        }.items()  # fmt: skip
        assert configs["unet"]["cross_attention_dim"] == width
    assert compvis._described(tmp_path / "a.ckpt", None, set()) is None


def test_a_schedule_without_signal_at_its_end(tmp_path):
    weights = small_weights(prediction_type="v_prediction")
    weights.scheduler["rescale_betas_zero_snr"] = True
    write_weights(weights, "diffusers", tmp_path / "d")
    scheduler = json.loads((tmp_path / "d" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["rescale_betas_zero_snr"] is True and scheduler["timestep_spacing"] == "trailing"
    assert build_model(open_model(tmp_path / "d").read(), "d").process.schedule.alphas_cumprod()[-1] == 0
    with pytest.raises(ModelError, match="know only the scaled_linear noise schedule"):
        write_weights(weights, "compvis", tmp_path / "c")


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("unet", {"block_out_channels": [102_400, 102_400, 102_400]}),
        ("unet", {"block_out_channels": [32, 64, 8192]}),
        ("unet", {"layers_per_block": 10**9}),
        ("unet", {"cross_attention_dim": 10**9}),
        ("unet", {"in_channels": 10**9}),
        ("vae", {"block_out_channels": [8192] * 4}),
        ("vae", {"layers_per_block": 10**9}),
        ("vae", {"latent_channels": 10**7}),
        ("text_encoder", {"vocab_size": 10**9}),
        ("text_encoder", {"d_model": 102_400}),
        ("text_encoder", {"encoder_layers": 10**9}),
        ("text_encoder", {"encoder_ffn_dim": 10**12}),
        ("text_encoder", {"max_position_embeddings": 10**11}),
    ],
)
def test_no_more_is_built_than_the_file_can_fill(weights, kind, changes):
    component = weights.components[kind]
    of_layers = changes.keys() & {"layers_per_block", "encoder_layers"}  # before a list of them is made
    what = r"has 10{9} layers for \d+ arrays" if of_layers else "describes a far larger network than the weights"
    with pytest.raises(ModelError, match=f"{kind}: the config {what}"):
        fill_component(kind, ComponentWeights({**component.config, **changes}, component.arrays, kind))
    fill_component(kind, component)


def test_layers_without_end_have_no_names(exported, tmp_path):
    for path, key in (("unet_config", "num_res_blocks"), ("cond_stage_config", "n_layer")):
        params = yaml.safe_load((exported / "compvis" / "model.yaml").read_text())
        params["model"]["params"][path]["params"][key] = 1000
        (tmp_path / "many.yaml").write_text(yaml.safe_dump(params))
        with pytest.raises(ModelError, match="the config has 1000 layers"):
            open_model(exported / "compvis" / "model.ckpt", config_file=tmp_path / "many.yaml").read()


@pytest.mark.parametrize("kind, key", [("unet", "down_block_types"), ("vae", "up_block_types")])
@pytest.mark.parametrize("name", ["AttnDownBlock2D", "SkipUpBlock2D", "Dream", 3])
def test_blocks_that_do_not_run_are_refused(kind, key, name):
    blocks = CONFIGS[kind][key][:-1] + [name]
    with pytest.raises(ModelError, match=f"{key} .* must be a list of "):
        complete_config(kind, CONFIGS[kind] | {key: blocks}, "a.json")


@pytest.mark.parametrize("form, length", [("ppdiffusers", 77), ("ppdiffusers", 12), ("diffusers", 12), ("compvis", 77)])
def test_the_example_of_the_model_card_runs(tmp_path, monkeypatch, form, length):
    weights = small_weights()
    text_encoder = weights.components["text_encoder"]
    text_encoder.config["max_position_embeddings"] = length
    table = text_encoder.arrays["model.embed_positions.weight"]
    text_encoder.arrays["model.embed_positions.weight"] = table[:length]
    weights.tokenizer = CaptionTokenizer(build_vocab(["red heart"]), length)
    write_weights(weights, form, tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    example = (tmp_path / "m" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(
        compile(example.replace("guidance_scale=7.5", "guidance_scale=7.5, num_inference_steps=2"), "card", "exec"), {}
    )
    assert (tmp_path / "m" / "picture.png").is_file()
    assert ("trained with 12: draw with ppldm" in example) == (form == "diffusers")


@pytest.mark.parametrize(
    "kind, changes",
    [("flow", {"timestep_shift": 3.0}), ("sample", {"beta_schedule": "squaredcos_cap_v2"}),
     ("v_prediction", {"timestep_shift": 2.0}), ("epsilon", {"beta_schedule": "cosine"})],
)  # fmt: skip
def test_an_export_says_which_process_it_is_of(tmp_path, kind, changes):
    """To ppldm exactly, and in the class and betas that diffusers has for it."""
    weights = small_weights(prediction_type=kind)
    weights.scheduler |= changes
    with pytest.raises(ModelError, match="CompVis"):
        write_weights(weights, "compvis", tmp_path / "c")
    write_weights(weights, "diffusers", tmp_path / "d")
    again = open_model(tmp_path / "d").read()
    assert Process.of(again.scheduler) == Process.of(weights.scheduler)
    assert Process.of(read_model_file(tmp_path / "d").process) == Process.of(weights.scheduler)
    scheduler = json.loads((tmp_path / "d/scheduler/scheduler_config.json").read_text())
    index = json.loads((tmp_path / "d/model_index.json").read_text())
    assert index["scheduler"] == ["diffusers", scheduler["_class_name"]]
    if kind == "flow":
        assert scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler" and scheduler["shift"] == 3.0
        assert "rectified flow: draw with ppldm" in (tmp_path / "d/README.md").read_text()
        scheduler["use_dynamic_shifting"] = True
        (tmp_path / "d/scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
        with pytest.raises(ModelError, match="use_dynamic_shifting"):
            open_model(tmp_path / "d").read()
    else:
        assert scheduler["_class_name"] == "DDIMScheduler" and scheduler["prediction_type"] == kind
        assert ("trained_betas" in scheduler) == (kind != "sample")
