"""The same numbers as PyTorch diffusers, in both directions. Needs requirements/parity.txt,
which run_scripts/test.sh --all installs.

Bars: 1e-4 of the largest absolute difference for every network and a whole trajectory of 10 steps; 1 of 255 on average
for pictures.
"""

import needs
import numpy as np
import paddle
import pytest
from small_weights import CONFIGS, differences, small_weights

needs.need("parity")

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel  # noqa: E402
from noise import initial_noise  # noqa: E402

from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab  # noqa: E402
from ppldm.diffusion.drawing import Drawing  # noqa: E402
from ppldm.diffusion.guided import draw, sample_latents  # noqa: E402
from ppldm.families.ldm_build import build_model  # noqa: E402
from ppldm.weights.components import PADDLE_ONLY, TORCH_ONLY  # noqa: E402
from ppldm.weights.formats.torch_files import read_torch  # noqa: E402
from ppldm.weights.layouts import compvis  # noqa: E402
from ppldm.weights.names import rename, text_encoder_names, unet_names, vae_names  # noqa: E402
from ppldm.weights.source import open_model  # noqa: E402
from ppldm.weights.write import write_weights  # noqa: E402

CLASSES = {"vae": diffusers.AutoencoderKL, "unet": diffusers.UNet2DConditionModel}
BAR = 1e-4


class Pair:
    """One model twice: `ours` in Paddle, and diffusers' parts."""

    def __init__(self, ours, folder):
        self.ours = ours
        self.vae = diffusers.AutoencoderKL.from_pretrained(folder / "vqvae").eval()
        self.unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
        self.text_encoder = LDMBertModel.from_pretrained(folder / "bert").eval()
        self.scheduler = diffusers.DDIMScheduler.from_pretrained(folder / "scheduler")


def born_in_torch(folder, safe: bool, prediction_type: str):
    torch.manual_seed(3)
    for name, kind in (("vqvae", "vae"), ("unet", "unet")):
        CLASSES[kind](**CONFIGS[kind]).save_pretrained(folder / name, safe_serialization=safe)
    LDMBertModel(LDMBertConfig(**CONFIGS["text_encoder"])).save_pretrained(folder / "bert", safe_serialization=safe)
    diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type=prediction_type,
    ).save_pretrained(folder / "scheduler")  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["torch-safetensors-epsilon", "torch-bin-v_prediction", "paddle-epsilon", "paddle-v_prediction"],
)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    origin, *_, prediction_type = request.param.split("-")
    if origin == "torch":
        born_in_torch(folder, "safetensors" in request.param, prediction_type)
        return Pair(build_model(open_model(folder).read(), folder), folder)
    weights = small_weights(5, prediction_type=prediction_type)
    write_weights(weights, "diffusers", folder / "d")
    return Pair(build_model(weights, "small"), folder / "d")


def gap(ours, theirs) -> float:
    ours, theirs = ours.numpy(), theirs.detach().numpy()
    assert ours.shape == theirs.shape and np.isfinite(theirs).all() and np.abs(theirs).max() > 0.1
    return float(np.abs(ours - theirs).max())


def both(rng, *shape):
    values = rng.standard_normal(shape, dtype=np.float32)
    return paddle.to_tensor(values), torch.tensor(values)


@torch.no_grad()
@paddle.no_grad()
def test_forward_parity(pair):
    rng = np.random.default_rng(1)
    ours, theirs = both(rng, 2, 3, 64, 64)
    assert gap(pair.ours.vae.encode(ours).latent_dist.parameters, pair.vae.encode(theirs).latent_dist.parameters) <= BAR
    ours, theirs = both(rng, 2, 4, 8, 8)
    assert gap(pair.ours.vae.decode(ours).sample, pair.vae.decode(theirs).sample) <= BAR
    ids = rng.integers(0, 60, (2, 77))
    assert gap(pair.ours.encode_text(paddle.to_tensor(ids)), pair.text_encoder(torch.tensor(ids))[0]) <= BAR
    context, their_context = both(rng, 2, 77, 32)
    for timestep in (0, 500, 999):
        one = pair.ours.unet(ours, timestep, encoder_hidden_states=context).sample
        other = pair.unet(theirs, timestep, encoder_hidden_states=their_context).sample
        assert gap(one, other) <= BAR


@torch.no_grad()
def test_ddim_trajectory_parity(pair):
    rng = np.random.default_rng(2)
    ours, theirs = both(rng, 2, 4, 8, 8)
    ids, empty = rng.integers(0, 60, (2, 77)), rng.integers(0, 60, (1, 77))
    said = (pair.ours.condition(paddle.to_tensor(one)) for one in (ids, empty))
    latents = sample_latents(pair.ours, *said, ours, Drawing(10, 3.0))
    context = torch.cat(
        [pair.text_encoder(torch.tensor(empty))[0].expand(2, -1, -1), pair.text_encoder(torch.tensor(ids))[0]]
    )
    pair.scheduler.set_timesteps(10)
    for timestep in pair.scheduler.timesteps:
        without, given = pair.unet(torch.cat([theirs] * 2), timestep, encoder_hidden_states=context).sample.chunk(2)
        theirs = pair.scheduler.step(without + 3.0 * (given - without), timestep, theirs).prev_sample
    assert gap(latents, theirs) <= BAR


@pytest.fixture(scope="module")
def tokenizer():
    return CaptionTokenizer(build_vocab(["a red heart", "two blue boats"]), 77)


@pytest.mark.parametrize(
    "prediction_type, changes",
    [("epsilon", {}), ("v_prediction", {}), ("sample", {"beta_schedule": "squaredcos_cap_v2"}),
     ("v_prediction", {"timestep_shift": 2.0})],
)  # fmt: skip
def test_diffusers_pipeline_draws_the_same(tmp_path, tokenizer, prediction_type, changes):
    weights = small_weights(6, prediction_type=prediction_type)
    weights.scheduler |= changes
    weights.tokenizer = tokenizer
    write_weights(weights, "diffusers", tmp_path / "d")
    pipeline = diffusers.LDMTextToImagePipeline.from_pretrained(str(tmp_path / "d"))
    noise = initial_noise(3, "a red heart", 0, (4, 8, 8))
    theirs = pipeline(["a red heart"], height=64, width=64, num_inference_steps=5, guidance_scale=4.0,
                      latents=torch.tensor(noise[None])).images[0]  # fmt: skip
    model = build_model(open_model(tmp_path / "d").read(), "d")
    ours = draw(model, tokenizer, ["a red heart"], [0], (4, 8, 8), 3, Drawing(5, 4.0))[0]
    assert ours.std() > 5
    assert np.abs(np.asarray(theirs).astype(int) - ours).mean() < 1


def test_what_torch_writes_we_read_and_the_other_way(tmp_path):
    weights = small_weights(7)
    write_weights(weights, "compvis", tmp_path / "c")
    with_torch = torch.load(tmp_path / "c" / "model.ckpt", weights_only=True)["state_dict"]
    assert all(
        (read == with_torch[name].numpy()).all() for name, read in read_torch(tmp_path / "c" / "model.ckpt").items()
    )
    torch.save({"state_dict": with_torch, "global_step": 1, "epoch": 0}, tmp_path / "c" / "model.ckpt")
    assert differences(open_model(tmp_path / "c" / "model.ckpt").read(), weights) == []


def test_names_of_compvis_are_those_of_diffusers_converters():
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint

    weights = small_weights(8)
    state = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in compvis.join(weights).items()}
    for kind, convert in (("unet", convert_ldm_unet_checkpoint), ("vae", convert_ldm_vae_checkpoint)):
        prefix = compvis.PREFIXES[kind]
        theirs = convert(state, weights.components[kind].config)
        ours = {name: {"unet": unet_names, "vae": vae_names}[kind](weights.components[kind].config) for name in theirs}
        assert theirs.keys() == weights.components[kind].arrays.keys()
        for name, value in theirs.items():
            original = state[prefix + rename(name, ours[name])]
            assert torch.equal(value.reshape(-1), original.reshape(-1))
    assert "transformer.attn_layers.layers.2.1.to_q" in text_encoder_names({"encoder_layers": 2}).values()


def test_schedule_tables_are_those_of_torch():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    bar = torch.cumprod(1 - betas, 0)
    tables = compvis.schedule_tables(
        {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    )
    assert (tables["betas"] == betas.float().numpy()).all()
    np.testing.assert_allclose(tables["alphas_cumprod"], bar.float().numpy(), rtol=1e-6)


def test_settings_of_one_library_alone():
    """What configs lose and gain between the libraries is what their classes differ in."""
    import inspect

    from ppdiffusers import AutoencoderKL, UNet2DConditionModel

    for kind, ours in (("vae", AutoencoderKL), ("unet", UNet2DConditionModel)):
        paddles, torchs = (set(inspect.signature(one.__init__).parameters) for one in (ours, CLASSES[kind]))
        assert paddles - torchs == set(PADDLE_ONLY[kind]) and torchs - paddles == set(TORCH_ONLY.get(kind, ()))
