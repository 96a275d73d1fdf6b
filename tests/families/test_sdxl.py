"""The family `sdxl` beside what every family keeps: sizes and empty captions, embeddings that are computed ahead,
adapters, and what is refused."""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import learn
from sampling import ALL

import ppldm
from ppldm.cache.command import precompute
from ppldm.families.base import get_family
from ppldm.inference.export import export
from ppldm.networks.configs import check_fit
from ppldm.networks.cpu_operators.layers import operators_are_usable
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.finetune import Pictures, Settings, read_start, train_command
from ppldm.training.commands.train import read_recipe
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import ConfigError, ModelError, PartError
from ppldm.weights.lora.files import read_lora
from ppldm.weights.source import open_model

PARTS = ("vae_name_or_path", "unet_config_file", "text_encoder_config_file", "text_encoder_2_config_file",
         "tokenizer_name")  # fmt: skip


def own_flags(tiny):
    return {
        "unet_config_file": tiny.config("sdxl"),
        "text_encoder_config_file": tiny.config("clip"),
        "text_encoder_2_config_file": tiny.config("clip"),
        "max_steps": 2,
    }


def train(tiny, folder, loop=True, **changes):
    own = own_flags(tiny)
    if "model_name_or_path" in changes:
        own |= dict.fromkeys(PARTS)
    words = tiny.flags(folder, **own | changes) + ([] if loop else ["--do_train"])
    run = prepare(*parse_arguments(words, loop, get_family("sdxl").Config))
    (run_loop if loop else run_trainer)(run)
    return run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl") / "run"
    train(tiny, folder)
    return folder


def losses(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def test_what_a_new_model_is_told_of_an_empty_caption_is_kept(tiny, run, tmp_path):
    """Zeros, unless the model says otherwise; a resumed run, a checkpoint and a pipeline all say so."""
    index = run / "pipeline/model_index.json"
    assert json.loads(index.read_text())["force_zeros_for_empty_prompt"] is True
    assert ppldm.load(run / "pipeline").model.empty_end and ppldm.load(run / "checkpoint-2").model.empty_end
    other = train(tiny, tmp_path / "other", empty_caption="embedding")
    assert other.state.model.empty_end is None
    for told, zeros in (({}, False), ({"empty_caption": "zeros"}, True)):
        start = tmp_path / "other/pipeline"
        again = train(tiny, tmp_path / f"again-{zeros}", model_name_or_path=start, **told)
        assert (again.state.model.empty_end is not None) == zeros
        index = json.loads((tmp_path / f"again-{zeros}/pipeline/model_index.json").read_text())
        assert index["force_zeros_for_empty_prompt"] is zeros
        assert (ppldm.load(tmp_path / f"again-{zeros}/checkpoint-2").model.empty_end is not None) == zeros


def test_the_dry_run_counts_both_text_encoders(tiny, tmp_path):
    recipe = read_recipe(tiny.flags(tmp_path / "dry", **own_flags(tiny)), True, get_family("sdxl").Config)
    components = reckon(recipe, 1)["components"]
    assert [one["class"] for one in components.values()] == [
        *("AutoencoderKL", "CLIPTextModel", "CLIPTextModelWithProjection", "UNet2DConditionModel")
    ]
    trained = {name: one["trained"] for name, one in components.items()}
    assert trained == {"vae": 0, "text_encoder": 0, "text_encoder_2": 0, "unet": components["unet"]["parameters"]}


@pytest.mark.parametrize("form", ["pipeline", "file"])
def test_embeddings_that_are_computed_ahead_are_the_same(tiny, run, tmp_path, form):
    """By a pipeline or a single file; with dropped captions, whose states are zeros whatever was cached."""
    source = run / "pipeline"
    if form == "file":
        export(str(source), str(tmp_path / "out"), to="compvis")
        source = tmp_path / "out/model.safetensors"
    told = {"model_name_or_path": run / "pipeline", "caption_drop": 0.5}
    cached = {"text_embeddings": "cached", "latents_dir": tmp_path / "latents", "text_embeddings_dtype": "float32"}
    with pytest.raises(PartError, match="ppldm precompute FILELIST --text-encoder PIPELINE"):
        train(tiny, tmp_path / "refused", **told, **cached)
    precompute(
        [tiny.file_list], text_encoder=str(source), model_max_length=12, text_dtype="float32",
        latents_dir=str(tmp_path / "latents"),
    )  # fmt: skip
    train(tiny, tmp_path / "plain", **told)
    train(tiny, tmp_path / "cached", **told, **cached)
    np.testing.assert_allclose(losses(tmp_path / "cached"), losses(tmp_path / "plain"), rtol=1e-6)


def test_cached_latents_have_the_same_sizes(tiny, tmp_path):
    """Of random crops and mirrored pictures too."""
    drawn = {"crop_fraction": 0.7, "random_flip": True, "num_crops": 3}
    kept = {"latents": "ondemand", "latents_dir": tmp_path / "latents"}
    runs = [train(tiny, tmp_path / name, **drawn, **more) for name, more in (("cached", kept), ("plain", {}))]
    keys = [(epoch, place) for epoch in range(4) for place in range(40)]
    cached, plain = (run.dataset.make_batch(keys)["sizes"] for run in runs)
    assert (cached == plain).all() and len({*map(tuple, plain.tolist())}) > 8
    assert (plain[:, :2] == [32, 36]).all() and (plain[:, 4:] == 32).all()
    with pytest.raises(ConfigError, match="cached latents do not keep where a smart crop lies"):
        train(tiny, tmp_path / "smart", random_crop=False, smart_crop=True, **kept)


def test_what_a_pipeline_says_of_empty_captions_is_read_or_refused(run, tmp_path):
    shutil.copytree(run / "pipeline", tmp_path / "pipeline")
    index = tmp_path / "pipeline/model_index.json"
    told = json.loads(index.read_text())
    index.write_text(json.dumps(told | {"force_zeros_for_empty_prompt": False}))
    assert ppldm.load(tmp_path / "pipeline").model.empty_end is None
    index.write_text(json.dumps(told | {"force_zeros_for_empty_prompt": "no"}))
    with pytest.raises(ModelError, match="force_zeros_for_empty_prompt 'no' is neither true nor false"):
        ppldm.load(tmp_path / "pipeline")


def test_it_is_fine_tuned_by_one_command(run, tmp_path):
    """Whose flags the family takes."""
    start = read_start(str(run / "pipeline"))
    assert start.family == "sdxl"
    drawn = ("", 1, ("picture 3",), 1)
    settings = Settings(tmp_path, start, "lora", 2, 2, 1, 1e-4, 32, *drawn)
    words = train_command(settings, Pictures(tmp_path, (), ("picture 3",), "", "pictures"))
    assert read_recipe([*words[5:]], True, config=None).model.trains_adapters


@pytest.mark.parametrize("loop", [True, False])
def test_adapters_of_the_unet_are_drawn_with(tiny, run, tmp_path, loop):
    told = {"model_name_or_path": run / "pipeline", "lora_rank": 2, "learning_rate": 0.1}
    train(tiny, tmp_path / "run", loop, max_steps=3, **told)
    found = read_lora(tmp_path / "run/lora")
    assert {*found.components} == {"unet"} and all("attn" in name for name in found.components["unet"])
    how = {"num_inference_steps": 2, "seed": 1, "output": "latents"}
    plain, adapted = (ppldm.load(run / "pipeline", lora=lora).generate("picture 3", **how)
                      for lora in ([], [str(tmp_path / "run/lora")]))  # fmt: skip
    assert (plain != adapted).any()


def test_guidance_and_sizes_are_told_to_the_unet(run):
    model, seen = ppldm.load(run / "pipeline"), []
    rng = np.random.default_rng(0)
    for parameter in model.model.unet.parameters():
        parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    how = {"num_inference_steps": 3, "seed": 1}
    plain, guided = (model.generate("picture 3", guidance_scale=scale, **how) for scale in (1.0, 5.0))
    other = model.generate("picture 3", guidance_scale=5.0, negative_prompt="picture 7", **how)
    assert (plain != guided).any() and (guided != other).any()
    both = model.generate(["picture 2", "picture 3"], guidance_scale=5.0, **how)
    rounding = 0 if operators_are_usable() else 2  # Paddle's operators add up a batch in another order
    assert abs(both[1].astype(int) - guided[0]).max() <= rounding < abs(both[0].astype(int) - guided[0]).max()
    hook = model.model.unet.register_forward_pre_hook(
        lambda _layer, _inputs, given: seen.append(given["added_cond_kwargs"]["time_ids"].tolist()), with_kwargs=True
    )
    model.generate("picture 3", height=64, width=32, guidance_scale=5.0, **how)
    hook.remove()
    assert seen == [[[64, 32, 0, 0, 64, 32]] * 2] * 3
    with pytest.raises(ConfigError, match="--prompt-syntax weighted is for models that look at the state of each word"):
        model.generate("(picture:2)", prompt_syntax="weighted", **how)


SEEDS = (1, 2, 3) if ALL else (1 + int(os.environ.get("PPLDM_SEED", 0)) % 3,)


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_it_overfits_and_tells_captions_and_sizes_apart(tiny, seed):
    """Over noises that it has not seen its error falls below half of what it was, and each of four pictures is told
    best by its own caption, and of two that share one by its own sizes."""
    model = get_family("sdxl").build(config_of(tiny), SimpleNamespace(resolution=32, buckets="off"), seed)
    rng = np.random.default_rng(seed)
    ids = model.tokenizer.encode([f"picture {number}" for number in (0, 1, 2, 2)])
    sizes = np.array([[32, 32, 0, 0, 32, 32]] * 3 + [[500, 700, 3, 20, 32, 32]])
    pictures = normals(rng, 4)
    moments = np.stack([pictures / model.latent_map.scale, np.zeros_like(pictures)], 1)  # no deviation

    def batch(rng, levels=(0, 1000)):
        noise = {"noise": normals(rng, 16), "posterior_noise": normals(rng, 16)}
        told = {"input_ids": np.concatenate([ids] * 4), "sizes": np.concatenate([sizes] * 4)}
        return {"moments": np.concatenate([moments] * 4), "timesteps": rng.integers(*levels, 16), **told, **noise}

    fixed = [batch(np.random.default_rng(99 + number)) for number in range(4)]
    before = errors(model, fixed).mean()
    learn(model, 4e-3, (batch(rng) for _ in range(340)))
    after = errors(model, fixed)
    assert after.mean() < 0.5 * before
    late = [batch(np.random.default_rng(7), (800, 1000))]
    own = errors(model, late).mean()
    for name in ("input_ids", "sizes"):
        swapped = [one | {name: np.roll(one[name], 1, axis=0)} for one in late]
        assert errors(model, swapped).mean() > 1.2 * own, name


def config_of(tiny, **changes):
    own = {"vae_name_or_path": tiny.vae, "tokenizer_name": tiny.tokenizer, "model_max_length": 12}
    return get_family("sdxl").Config(**own | {name: value for name, value in own_flags(tiny).items()
                                              if name != "max_steps"} | changes)  # fmt: skip


def normals(rng, size):
    return rng.standard_normal((size, 4, 4, 4), np.float32)


@paddle.no_grad()
def errors(model, batches) -> np.ndarray:
    model.eval()
    given = ({name: paddle.to_tensor(one) for name, one in batch.items()} for batch in batches)
    return np.concatenate([model(**one).per_sample.numpy() for one in given])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"lora_rank": 2, "lora_components": "text_encoder"}, "--lora_components text_encoder is not one of unet"),
        ({"text_encoder_2_config_file": None}, "nothing gives the text_encoder_2"),
        ({"unet_config_file": None}, "nothing gives the unet"),
        ({"unet_config_file": "unet"}, "told no state of a whole caption"),
        (
            {"unet_config_file": "unet_sdxl"},
            "a state of 1280 numbers of a caption, and text_encoder_2 projects to 32",
        ),
        ({"text_encoder_config_file": "clip_tiny"}, "the UNet attends to width 64 and the text encoder gives 160"),
    ],
)
def test_what_cannot_work_is_refused_first(tiny, tmp_path, changes, words):
    changes = {name: tiny.config("unet") if value == "unet" else value for name, value in changes.items()}
    with pytest.raises((ConfigError, ModelError), match=words):
        train(tiny, tmp_path / "run", file_list="/nope", **changes)
    assert not (tmp_path / "run").exists()


def test_networks_that_were_not_made_for_one_another(run):
    whole = {name: one.config for name, one in open_model(run / "pipeline").read().components.items()}
    check_fit(whole)
    for wrong, words in (
        ({"text_encoder_2": whole["text_encoder_2"] | {"projection_dim": 40}}, "projects to 40"),
        ({"text_encoder": whole["text_encoder"] | {"hidden_size": 41}}, "the text encoder gives 73"),
    ):
        with pytest.raises(ModelError, match=words):
            check_fit(whole | wrong)
    other = get_family("stable_diffusion")
    config = other.Config(model_name_or_path=str(run / "pipeline"), model_max_length=12)
    with pytest.raises(ModelError, match="asks for an input .* but Stable Diffusion XL"):
        other.check(config, SimpleNamespace(resolution=32, buckets="off", text_embeddings="off"))
