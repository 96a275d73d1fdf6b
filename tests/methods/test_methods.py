"""Methods that a recipe names: what each adds to a training, and what is refused."""

import itertools
import json

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from paddle.nn import functional as F
from tiny_model import load_pipeline, make_batch, make_model, write_dinov2

from ppldm.families.base import get_family
from ppldm.families.ldm import LdmConfig
from ppldm.families.transformers import UVitConfig
from ppldm.methods.base import attach_methods, list_methods, read_methods
from ppldm.methods.contrastive_flow import ContrastiveFlow
from ppldm.methods.parts import blocks_of, extras_of
from ppldm.networks.model import Step
from ppldm.networks.transformers.microdit import Grid, put_patches, take_patches
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError
from ppldm.weights.losses import load_dinov2
from ppldm.weights.model_file import read_model_file

NAMES = ["alignment", "consistency", "contrastive_flow", "mup", "tread"]


def attached(tiny, *words, **settings):
    """A model that is trained by methods, in training mode."""
    model = make_model(tiny, **settings)
    attach_methods(model, read_methods([*words], LdmConfig()), seed=3)
    model.train()
    return model


def step_of(model, seed=0, batch=4, latents=None):
    rng = np.random.default_rng(seed)
    predicted, other, noise = (rng.standard_normal((batch, 4, 4, 4), np.float32) for _ in range(3))
    timesteps = paddle.to_tensor(rng.integers(0, 1000, batch))
    levels = model.levels[timesteps].reshape([-1, 1, 1, 1])
    latents = paddle.to_tensor(other) if latents is None else latents
    scales = model.process.scales(levels)
    noise = paddle.to_tensor(noise)
    return Step(
        latents,
        noise,
        scales,
        paddle.to_tensor(predicted),
        model.process.target(latents, noise, scales),
        lambda whole: whole,
        timesteps,
        {},
    )


def test_these_are_known():
    assert [name for name in list_methods() if name in NAMES] == NAMES


@pytest.mark.parametrize(
    "words, config, said",
    [
        (["contrastiv_flow"], LdmConfig(), "contrastiv_flow is not known; did you mean contrastive_flow"),
        (["contrastive_flow:wait=1"], LdmConfig(), "has no option wait; did you mean weight"),
        (["contrastive_flow:weight=much"], LdmConfig(), "weight 'much' is not a number"),
        (["contrastive_flow:weight=nan"], LdmConfig(), "must be above 0 and below 1"),
        (["contrastive_flow:weight=1"], LdmConfig(), "must be above 0 and below 1"),
        (["alignment:weight=0"], LdmConfig(), "weight 0 must be above 0"),
        (["alignment", "alignment:weight=1"], LdmConfig(), "names one method twice"),
        (["tread"], LdmConfig(), "is for models with a transformer"),
        (["alignment:features=gone"], LdmConfig(), "features gone is not there; give a file or folder"),
        (["alignment:block=1"], LdmConfig(), "block 1 is not one of a unet"),
        (["alignment"], UVitConfig(patch_masking=0.5), "--patch_masking leaves patches out"),
        (["alignment"], UVitConfig(methods=["alignment", "tread"]), "tread leads patches around"),
        (["tread:rate=1"], UVitConfig(), "rate 1 must be above 0 and below 1"),
        (["tread:ends=0"], UVitConfig(), "ends 0 must be 1 or more"),
        (["tread"], UVitConfig(patch_masking=0.5), "--patch_masking leaves patches out already"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words, config, said):
    with pytest.raises(ConfigError, match=said):
        read_methods(words, config)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--methods", "alignment", "--to_static"], "--to_static is not supported for --methods alignment"),
        (["--methods", "alignment", "--lora_rank", "2"], "cannot train adapters"),
    ],
)
def test_a_training_that_cannot_be_is_refused_at_once(tiny, tmp_path, flags, said):
    with pytest.raises(ConfigError, match=said):
        prepare(*parse_arguments([*tiny.flags(tmp_path / "run"), *flags], True, get_family("ldm").Config))


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample", "flow", "flow_sample"])
def test_contrastive_flow_is_the_mean_over_all_pairs(tiny, kind):
    """Up to a constant: between two predictions it differs as the mean over all other rows and noises does."""
    model = attached(tiny, "contrastive_flow", prediction_type=kind)
    (method,) = model.methods
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((6, 4, 4, 4)) + 0.7
    rows += (rows.mean((2, 3)).mean(0) - rows.mean((0, 2, 3)))[:, None, None]
    noises = rng.standard_normal((4, 4, 4, 4))
    noises = np.concatenate([noises, -noises])  # of mean 0
    model.contrastive_mean.set_value(rows.mean((0, 2, 3)).astype(np.float32))
    # A row's mean by channel stands for all of its places.
    rows = np.broadcast_to(rows.mean((2, 3), keepdims=True), rows.shape)

    def over_pairs(step):
        scales = [one.numpy().astype(np.float64) for one in step.scales]
        errors = [
            ((step.predicted.numpy() - model.process.target(row[None], noise[None], scales)) ** 2).mean()
            for row, noise in itertools.product(rows, noises)
        ]
        return -method.weight * np.mean(errors)

    one = step_of(model, seed=1)
    other = one._replace(predicted=step_of(model, seed=2).predicted)
    found = float(method.term(model, one) - method.term(model, other))
    assert found == pytest.approx(over_pairs(one) - over_pairs(other), rel=1e-4)


def test_contrast_is_between_the_same_patches(tiny):
    """Of a masked transformer what counts are patches, [B, K, 1, C p p]: a mean over them, like the loss."""
    model, method = attached(tiny, "contrastive_flow", prediction_type="v_prediction"), ContrastiveFlow()
    model.contrastive_mean.set_value(np.float32([1, 2, 3, 4]))
    grid, kept = Grid(2, 2, 2), paddle.to_tensor([[0, 3], [1, 2]])

    def seen(whole):
        return take_patches(grid.split(whole), kept).unsqueeze(2)

    whole = step_of(model, batch=2)
    other = -whole.scales[1] * paddle.to_tensor(np.float32([1, 2, 3, 4])).reshape([1, 4, 1, 1]).expand([2, 4, 4, 4])
    expected = -method.weight * float((seen(whole.predicted) - seen(other)).square().mean())
    step = whole._replace(predicted=seen(whole.predicted), target=seen(whole.target), seen=seen)
    assert float(method.term(model, step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cut", [[8], [4, 4], [1, 3, 4]])
def test_the_mean_of_latents_does_not_depend_on_how_an_update_is_cut(tiny, cut):
    model, method = attached(tiny, "contrastive_flow"), ContrastiveFlow()
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((3, 8, 4, 4, 4), np.float32) + 1
    for latents in updates:
        parts = np.split(latents, np.cumsum(cut)[:-1])
        sums = [method.sums(model, step_of(model, batch=len(one), latents=paddle.to_tensor(one))) for one in parts]
        method.keep(model, paddle.add_n(sums))
    np.testing.assert_allclose(model.contrastive_mean.numpy(), updates.mean((0, 1, 3, 4)), rtol=1e-5)


def test_alignment_is_the_cosine_between_projected_states_and_features(tiny):
    model = attached(tiny, "alignment")
    (method,) = model.methods
    model.loss(make_batch(2))
    step = step_of(model, batch=2)
    hidden = paddle.randn([2, model.unet.config.block_out_channels[-1], 2, 2])
    model.taps["alignment"] = hidden
    found = float(method.term(model, step))
    vae, latents = model.vae, model.latent_map.to_autoencoder(step.latents)
    features = vae.decoder.mid_block(vae.decoder.conv_in(vae.post_quant_conv(latents))).numpy().astype(np.float64)
    features -= 0.6 * features.mean((2, 3), keepdims=True)
    features /= features.std((2, 3), keepdims=True, ddof=1)
    features = features.reshape(2, -1, 2, 2, 2, 2).mean((3, 5))
    projected = model.alignment_projector(hidden).numpy().astype(np.float64)
    lengths = np.linalg.norm(features, axis=1) * np.linalg.norm(projected, axis=1)
    assert found == pytest.approx(0.5 * (1 - ((features * projected).sum(1) / lengths).mean()), rel=1e-4)


def prepared(tiny, folder, name, *flags):
    """A run of a family with a transformer, in training mode."""
    words = tiny.flags(folder, max_steps=1)
    place = words.index("--unet_config_file")
    own = ("--transformer_config_file", tiny.config(name), "--train_text_encoder", *flags)
    run = prepare(*parse_arguments([*words[:place], *words[place + 2 :], *own], True, get_family(name).Config))
    run.state.model.train()
    return run


@pytest.mark.parametrize("name", ["uvit", "dit", "microdit", "single_stream"])
def test_tokens_of_patches_are_aligned_with_those_of_dinov2(tiny, tmp_path, name):
    """Patch by patch, behind the block that is named; a crop is read beside latents too."""
    dinov2 = write_dinov2(tiny.folder)
    crops = ("--latents", "ondemand", "--random_crop", "false") if name == "dit" else ()
    run = prepared(tiny, tmp_path / "run", name, "--methods", f"alignment:features={dinov2},block=2", *crops)
    model, batch, seen = run.state.model, next(iter(run.batches())), []
    (method,), blocks = model.methods, blocks_of(model.transformer)
    blocks[1].register_forward_post_hook(lambda _, given, made: seen.append(made))
    plain = float(model.loss(batch).value)
    pixels = batch["alignment_pixels"]
    assert crops or (pixels == batch["pixel_values"]).all()
    features = load_dinov2(dinov2).features(pixels).numpy().astype(np.float64)
    features -= 0.6 * features.mean((2, 3), keepdims=True)
    features /= features.std((2, 3), keepdims=True, ddof=1)
    count, side = len(features), 4 // model.transformer.config.patch_size
    tokens = seen[0][:, extras_of(model.transformer) :].reshape([count, side, side, -1]).transpose([0, 3, 1, 2])
    projected = model.alignment_projector(tokens).numpy().astype(np.float64)
    features = F.adaptive_avg_pool2d(paddle.to_tensor(features), [side, side]).numpy()
    lengths = np.linalg.norm(features, axis=1) * np.linalg.norm(projected, axis=1)
    expected = 0.5 * (1 - ((features * projected).sum(1) / lengths).mean())
    model.methods = ()
    assert plain - float(model.loss(batch).value) == pytest.approx(expected, rel=1e-3)
    assert not any("dinov2" in parameter.name for parameter in model.parameters())
    assert method.unsupported(UVitConfig()) == ("to_static", "recompute")


def test_alignment_takes_a_vae_without_a_convolution_behind_its_latents(tiny):
    """As Stable Diffusion 3's is."""
    model = attached(tiny, "alignment")
    model.vae.post_quant_conv = None
    batch, latents = make_batch(2), paddle.randn([2, 4, 4, 4])
    (method,) = model.methods
    found = method._features(model, latents)
    decoder = model.vae.decoder
    hidden = decoder.mid_block(decoder.conv_in(model.latent_map.to_autoencoder(latents)))
    hidden = hidden - 0.6 * hidden.mean([2, 3], keepdim=True)
    np.testing.assert_allclose(found.numpy(), (hidden / hidden.std([2, 3], keepdim=True)).numpy(), rtol=1e-3, atol=1e-5)
    assert np.isfinite(float(model.loss(batch).value))


@pytest.mark.parametrize("words", [["alignment"], ["contrastive_flow"], ["alignment", "contrastive_flow"]])
def test_terms_are_of_the_training_only(tiny, words):
    plain, model, batch = make_model(tiny), attached(tiny, *words), make_batch(4)
    for one in (plain, model):  # a new UNet predicts zeros
        one.unet.conv_out.weight.set_value(paddle.full_like(one.unet.conv_out.weight, 0.1))
    plain.train()
    assert float(model.loss(batch).value) != float(plain.loss(batch).value)
    plain.eval(), model.eval()
    assert float(model.loss(batch).value) == float(plain.loss(batch).value)


@pytest.mark.parametrize("name", ["uvit", "microdit", "single_stream"])
def test_patches_go_around_the_inner_blocks(tiny, tmp_path, name):
    """The blocks between see the others only, and no patch is lost to the loss."""
    run = prepared(tiny, tmp_path / "run", name, "--methods", "tread:rate=0.25")
    model, seen = run.state.model, []
    network = model.transformer
    blocks, extras = blocks_of(network), {"uvit": 13, "single_stream": 12}.get(name, 0)
    for block in blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1] - extras))
    turns = []
    if name == "single_stream":
        for block in blocks:
            block.register_forward_pre_hook(lambda _, given: turns.append(given[1]))
    batch = next(iter(run.batches()))
    patches = model.inputs["noise"].shape(32, 32)[1] ** 2 // network.config.patch_size**2
    loss = model.loss(batch)
    assert seen == [patches, patches - patches // 4, patches]
    if turns:  # positions go around with the patches
        whole = turns[0].expand_as(paddle.concat([turns[0]] * len(batch["routed_patches"])))
        assert (turns[1][:, extras:] == take_patches(whole[:, extras:], batch["routed_patches"])).all()
        assert turns[2].shape == turns[0].shape
    loss.value.backward()
    assert all(p.grad is not None for p in model.trained_parameters().values() if "pos_embed" in p.name)
    if name == "single_stream":  # so do the first block's values
        config = {**network.config, "value_residual": True}
        (tmp_path / "mixes.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("_")}))
        words = "--methods", "tread:rate=0.25", "--transformer_config_file", tmp_path / "mixes.json"
        mixes = prepared(tiny, tmp_path / "mixes", name, *map(str, words)).state.model
        shapes = []
        for block in mixes.transformer.blocks:
            block.register_forward_pre_hook(lambda _, given: shapes.append(given[4].shape == given[0].shape))
        mixes.loss(batch).value.backward()
        assert shapes == [True] * len(blocks) and mixes.transformer.blocks[1].attn.mixture.grad is not None
    model.eval()
    seen.clear()
    model.loss(batch)
    assert seen == [patches] * len(blocks)


def test_patches_come_back_to_their_places():
    rng = np.random.default_rng(0)
    whole, new = rng.standard_normal((2, 9, 3), np.float32), rng.standard_normal((2, 4, 3), np.float32)
    kept = np.stack([np.sort(rng.permutation(9)[:4]) for _ in range(2)])
    expected = whole.copy()
    np.put_along_axis(expected, kept[:, :, None], new, axis=1)
    found = put_patches(*map(paddle.to_tensor, (whole, new, kept)))
    assert (found.numpy() == expected).all()
    assert (take_patches(found, paddle.to_tensor(kept)).numpy() == new).all()


def test_what_is_trained_beside_the_networks_is_kept_and_not_exported(tiny, tmp_path):
    words = [*tiny.flags(tmp_path / "run", max_steps=2), "--methods", "alignment", "contrastive_flow"]
    run = prepare(*parse_arguments(words, True, get_family("ldm").Config))
    before = {name: p.numpy().copy() for name, p in run.state.model.alignment_projector.named_parameters()}
    run_loop(run)
    kept = paddle.load(str(tmp_path / "run/checkpoint-2/model_state.pdparams"), return_numpy=True)
    for name, value in before.items():
        assert not (kept[f"alignment_projector.{name}"] == value).all()
    assert float(kept["contrastive_updates"][0]) == 2
    assert read_model_file(tmp_path / "run/checkpoint-2").components["alignment_projector"].trained
    assert not list((tmp_path / "run/pipeline").glob("*projector*"))
    for folder in ("pipeline", "checkpoint-2"):
        drawn = load_pipeline(tmp_path / "run" / folder)
        assert not hasattr(drawn, "alignment_projector")
