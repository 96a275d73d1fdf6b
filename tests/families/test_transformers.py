"""The families of transformers: what they refuse, what they export, and how one stage goes on from another."""

import io
import json

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from PIL import Image

import ppldm
from ppldm.config.network_files import CONFIG_DIR
from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.diffusion.drawing import Drawing
from ppldm.families.base import get_family
from ppldm.networks.build import build_network
from ppldm.networks.configs import check_config, read_new_config
from ppldm.networks.cpu_operators.layers import use_cpu_operators
from ppldm.networks.transformers.microdit import MicroDiT
from ppldm.networks.transformers.single_stream import SingleStreamTransformer
from ppldm.networks.transformers.transform import transform
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.components import turn_linear
from ppldm.weights.fill import component_of, parameter_shapes
from ppldm.weights.formats.files import read_arrays
from ppldm.weights.formats.torch_files import write_torch
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import write_component, write_weights
from tests.conftest import MICRODIT_CONFIG, UVIT_CONFIG

FAMILIES = ("uvit", "dit", "microdit", "single_stream")


def train(tiny, name, folder, **changes):
    own = {
        "unet_config_file": None,
        "transformer_config_file": tiny.config(name),
        "text_encoder_config_file": tiny.config("clip"),
        "max_steps": 2,
    } | changes
    words = tiny.flags(folder, **own)
    words += [] if "model_name_or_path" in changes or "--lora_rank" in words else ["--train_text_encoder"]
    run = prepare(*parse_arguments(words, True, get_family(name).Config))
    run_loop(run)
    return run


@pytest.fixture(params=FAMILIES, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipeline(tiny, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name) / "run"
    train(tiny, name, folder, patch_masking=0.5)
    return folder / "pipeline"


# As published: tables of arXiv:2209.12152 (MS-COCO; H/2 of ImageNet) and arXiv:2310.00426, rounded as there.
@pytest.mark.parametrize(
    "file, millions, digits",
    [("uvit_s2", 45, 0), ("uvit_s2_deep", 58, 0), ("uvit_h2", 501, 0), ("dit_pixart_xl2", 0.61e3, -1)],
)
def test_published_sizes(file, millions, digits):
    config = read_new_config("transformer", CONFIG_DIR / f"{file}.json", "--transformer_config_file")
    count = sum(int(np.prod(shape)) for shape in parameter_shapes("transformer", config).values())
    assert round(count / 1e6, digits) == millions


def test_the_exported_transformer_is_loaded_by_its_class(pipeline, name):
    from ppdiffusers import UViTT2IModel

    model = ppldm.load(pipeline).model
    described = json.loads((pipeline / "model.json").read_text())
    assert described["family"] == name and described["components"]["transformer"]["trained"]
    if name == "dit":  # whose class cannot be built by ppdiffusers with its layers for captions
        return
    own = {"uvit": UViTT2IModel, "microdit": MicroDiT, "single_stream": SingleStreamTransformer}[name]
    network = own.from_pretrained(str(pipeline / "transformer"))
    use_cpu_operators(network)  # as ours has them: to the bit
    rng = np.random.default_rng(0)
    noisy, hidden = (paddle.to_tensor(rng.standard_normal(s, np.float32)) for s in ((2, 4, 4, 4), (2, 12, 32)))
    timesteps = paddle.to_tensor([3, 900])
    with paddle.no_grad():
        theirs, ours = network(noisy, timesteps, hidden), transform(model.denoiser, noisy, timesteps, hidden)
    assert ((theirs.sample if name == "uvit" else theirs) == ours).all()


def test_pictures_of_other_sides_are_drawn(pipeline):
    model = ppldm.load(pipeline)
    given = {"num_inference_steps": 2, "seed": 1, "height": 48, "width": 64}
    both = model.generate(["picture 1", "picture 2"], **given)
    assert both.shape == (2, 1, 48, 64, 3)
    assert (model.generate("picture 2", batch_size=1, **given)[0] == both[1]).all()


def test_prompts_of_several_chunks(pipeline, name):
    loaded, how = ppldm.load(pipeline), {"negative_prompts": [""], "drawing": Drawing(1), "size": (32, 32)}
    assert loaded.draw(["(picture:2) 1"], [0], [1], weighted=True, **how).shape == (1, 32, 32, 3)
    if name == "uvit":
        with pytest.raises(ConfigError, match="BREAK makes 2 chunks .* places for the words of one; omit BREAK"):
            loaded.draw(["picture BREAK 1"], [0], [1], weighted=True, **how)
    else:
        assert loaded.draw(["picture BREAK 1"], [0], [1], weighted=True, **how).shape == (1, 32, 32, 3)


@pytest.mark.needs("parity")
def test_it_is_exported_to_diffusers_and_read_again(pipeline, name, tmp_path):
    weights = open_model(pipeline).read()
    only_here = name in ("uvit", "single_stream")
    for form in ("compvis", "diffusers") if only_here else ("compvis",):
        with pytest.raises(ModelError, match=f"{form} has no network of this transformer's kind"):
            write_weights(weights, form, tmp_path / form)
    if only_here:
        return
    write_weights(weights, "diffusers", tmp_path / "out")
    if name == "dit":
        from diffusers import PixArtTransformer2DModel

        _, told = PixArtTransformer2DModel.from_pretrained(tmp_path / "out/transformer", output_loading_info=True)
        assert not any(told.values())
    again = open_model(tmp_path / "out").read().components["transformer"]
    before = weights.components["transformer"]
    assert again.config == before.config and again.arrays.keys() == before.arrays.keys()
    assert all((again.arrays[key] == value).all() for key, value in before.arrays.items())


@pytest.mark.parametrize("prefix", ["", "dit."])
def test_a_file_of_micro_diffusion_is_read_and_written(tmp_path, prefix):
    """The state of its class: PyTorch's orientation, with two tables that are computed here."""
    config = check_config("transformer", MICRODIT_CONFIG, "x")
    network = build_network("transformer", config, 1)
    own = component_of("transformer", network)
    state = turn_linear(own.arrays) | {"pos_embed": np.ones((1, 4, 32), "f4"), "mask_token": np.zeros((1, 1, 16), "f4")}
    write_torch(tmp_path / "dit.pt", {prefix + key: np.ascontiguousarray(value) for key, value in state.items()}, {})
    (tmp_path / "dit.json").write_text(json.dumps(config))
    found = read_component("transformer", tmp_path / "dit.pt")
    assert found.config == config and found.arrays.keys() == own.arrays.keys()
    assert all((found.arrays[key] == value).all() for key, value in own.arrays.items())
    write_component("transformer", found, tmp_path / "out", "diffusers")
    written = read_arrays(tmp_path / "out/diffusion_pytorch_model.safetensors")
    assert {key: value.shape for key, value in written.items()} == {key: value.shape for key, value in state.items()}
    assert all((written[key] == state[key]).all() for key in state if key != "pos_embed")
    noisy, timesteps = paddle.zeros([1, 4, 4, 4]), paddle.zeros([1], "int64")
    seen = []
    network.patch_mixer_map_xin.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    transform(network, noisy, timesteps, paddle.zeros([1, 2, 32]))
    np.testing.assert_allclose(seen[0], written["pos_embed"] + state["x_embedder.proj.bias"], atol=1e-6)


def test_a_published_file_of_micro_diffusion_has_the_published_size(tmp_path):
    config = read_new_config("transformer", CONFIG_DIR / "microdit_xl2.json", "x")
    shapes = {"x_embedder.proj.weight": (1024, 16, 2, 2), "y_embedder.y_proj.fc1.weight": (1024, 512)}
    write_torch(tmp_path / "dit.pt", {key: np.zeros(shape, np.float16) for key, shape in shapes.items()}, {})
    found = read_component("transformer", tmp_path / "dit.pt")
    assert found.config == config | {"in_channels": 16, "caption_channels": 512}
    write_torch(tmp_path / "other.pt", {"weight": np.zeros(3, np.float16)}, {})
    with pytest.raises(ModelError, match="other.pt is not a transformer of micro_diffusion"):
        read_component("transformer", tmp_path / "other.pt")


@pytest.mark.slow
def test_a_stage_goes_on_at_a_larger_size_from_the_export(tiny, pipeline, name, tmp_path):
    parts = dict.fromkeys(("vae_name_or_path", "text_encoder_config_file", "transformer_config_file", "tokenizer_name"))
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    write_part(tmp_path / "part-00000.gz", [Row(f"picture {number}", buffer.getvalue(), {}) for number in range(8)])
    write_filelist(tmp_path / "large.filelist", ["part-00000.gz"])
    given = {"model_name_or_path": pipeline, "resolution": 64, "file_list": tmp_path / "large.filelist", **parts}
    run = train(tiny, name, tmp_path / "next", patch_masking=0.75, **given)
    assert run.dataset.inputs["kept_patches"].shape(64, 64) == (4,)
    again = open_model(tmp_path / "next/pipeline").read()
    assert again.metadata["resolution"] == 64
    assert again.components["transformer"].config == open_model(pipeline).read().components["transformer"].config


@pytest.mark.slow
def test_adapters_are_trained_in_a_transformer(tiny, pipeline, name, tmp_path):
    parts = dict.fromkeys(("vae_name_or_path", "text_encoder_config_file", "transformer_config_file", "tokenizer_name"))
    given = {"model_name_or_path": pipeline, "lora_rank": 2, **parts}
    train(tiny, name, tmp_path / "run", **given)
    base, lora = ppldm.load(pipeline), ppldm.load(pipeline, lora=[str(tmp_path / "run/lora")])
    with paddle.no_grad():
        mine, theirs = base.model.denoiser.state_dict(), lora.model.denoiser.state_dict()
    changed = {key for key in mine if (mine[key] != theirs[key]).any()}
    assert changed and all("attn" in key for key in changed)


@pytest.mark.parametrize(
    "which, changes, error, words",
    [
        ("uvit", {"resolution": 40}, ConfigError, "--resolution 40 must be a multiple of 16"),
        ("uvit", {"buckets": "32x32,40x32"}, ConfigError, "--buckets .*: the sides of 40 x 32 must be multiples of 16"),
        ("uvit", {"transformer_config_file": "dit"}, ModelError, "of another kind; train it as `family: dit`"),
        ("dit", {"transformer_config_file": "uvit"}, ModelError, "of another kind; train it as `family: uvit`"),
        ("uvit", {"mask_pad_tokens": True}, ConfigError, "--mask_pad_tokens is not for UViTs"),
        ("microdit", {"mask_pad_tokens": True}, ConfigError, "--mask_pad_tokens is not for MicroDiTs"),
        ("dit", {"patch_masking": 1.0}, ConfigError, "--patch_masking 1.0 must be"),
        ("dit", {"transformer_config_file": None}, ConfigError, "nothing gives the transformer"),
    ],
)
def test_what_cannot_work_is_refused_first(tiny, tmp_path, which, changes, error, words):
    if changes.get("transformer_config_file"):
        changes = {"transformer_config_file": tiny.config(changes["transformer_config_file"])}
    with pytest.raises(error, match=words):
        train(tiny, which, tmp_path / "run", file_list="/nope", **changes)
    assert not (tmp_path / "run").exists()


def test_a_new_uvit_has_positions_for_the_captions_and_a_trained_one_keeps_them(tiny, tmp_path):
    config = get_family("uvit").Config(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("clip"), train_text_encoder=True,
        transformer_config_file=tiny.config("uvit"), model_max_length=7,
    )  # fmt: skip
    assert config.new_config("transformer")["num_text_tokens"] == 7
    trained = {"vae": None, "text_encoder": None, "transformer": config.new_config("transformer") | UVIT_CONFIG}
    with pytest.raises(ModelError, match="has positions for 12 tokens of a caption; give it --model_max_length 12"):
        get_family("uvit").check_configs(trained, config)
