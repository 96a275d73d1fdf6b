"""Transformers in the place of the UNet: what they compute, and what becomes of patches that are left out."""

import math

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overfit import overfit

from ppldm.config.network_files import CONFIG_DIR
from ppldm.data.inputs import KeptPatches
from ppldm.diffusion.process import Process
from ppldm.networks.build import build_network
from ppldm.networks.configs import check_config, read_new_config
from ppldm.networks.transformers.microdit import Grid, grid_of, take_patches
from ppldm.networks.transformers.transform import TransformerDiffusionModel, make_transformer, transform
from ppldm.utils.rng import Generators
from ppldm.weights.components import turn_linear
from ppldm.weights.configs import PUBLISHED_SCHEDULE
from ppldm.weights.fill import component_of, load_vae, parameter_shapes
from tests.conftest import DIT_CONFIG, MICRODIT_CONFIG, SINGLE_STREAM_CONFIG, TEXT_ENCODER_CONFIG, UVIT_CONFIG

CONFIGS = {"uvit": UVIT_CONFIG, "dit": DIT_CONFIG, "microdit": MICRODIT_CONFIG, "single_stream": SINGLE_STREAM_CONFIG}
LENGTH, WIDTH = 12, 32


def config_of(name, **changes):
    return check_config("transformer", CONFIGS[name] | changes, name)


def randomised(name, **changes):
    """A network of which no weight is zero."""
    network = make_transformer(config_of(name, **changes))
    rng = np.random.default_rng(3)
    for parameter in network.parameters():
        parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    network.eval()
    return network


def given_for(height=8, width=8, batch=3):
    rng = np.random.default_rng(4)
    noisy = rng.standard_normal((batch, 4, height, width), np.float32)
    hidden = rng.standard_normal((batch, LENGTH, WIDTH), np.float32)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH, (batch, 1))).astype(np.int64)
    timesteps = rng.integers(0, 1000, batch)
    return [paddle.to_tensor(one) for one in (noisy, timesteps, hidden, mask)]


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


@pytest.mark.parametrize("name", ["uvit", "dit"])
@paddle.no_grad()
def test_the_forward_is_that_of_ppdiffusers_to_the_bit(name):
    network, (noisy, timesteps, hidden, mask) = randomised(name, sample_size=8), given_for()
    if name == "uvit":
        theirs = network(noisy, timesteps, hidden).sample
        ours = transform(network, noisy, timesteps, hidden)
    else:
        sizes = {"resolution": None, "aspect_ratio": None}
        theirs = network(noisy, hidden, timesteps, sizes, encoder_attention_mask=mask).sample
        ours = transform(network, noisy, timesteps, hidden, mask)
    assert ours.shape == [3, 4, 8, 8] and (ours == theirs).all() and ours.std() > 0.01


@paddle.no_grad()
def test_a_network_of_twice_the_channels_gives_the_mean():
    network, (noisy, timesteps, hidden, _) = randomised("dit", sample_size=8, out_channels=8), given_for()
    theirs = network(noisy, hidden, timesteps, {"resolution": None, "aspect_ratio": None}).sample
    assert (transform(network, noisy, timesteps, hidden) == theirs[:, :4]).all()


@paddle.no_grad()
def test_positions_of_other_sides_lie_between_those_of_the_table():
    table = randomised("uvit", sample_size=8)
    height = paddle.arange(4, dtype="float32").reshape([1, 4, 1, 1]).expand([1, 4, 4, 32]).flatten(1, 2)
    table.pos_embed.set_value(paddle.concat([paddle.zeros([1, 13, 32]), height], 1))
    seen = []
    table.in_blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    noisy, timesteps, hidden, _ = given_for(16, 12)
    for parameter in table.patch_embed.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    out = transform(table, noisy, timesteps, hidden)
    rows = seen[0][0, 13:].reshape([8, 6, 32])
    expected = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])
    assert out.shape == [3, 4, 16, 12]
    np.testing.assert_allclose(rows, np.broadcast_to(expected[:, None, None], (8, 6, 32)), atol=1e-6)


@paddle.no_grad()
def test_patches_that_are_left_out_reach_nothing_but_a_mixer(name):
    network, (noisy, timesteps, hidden, _) = randomised(name, sample_size=8), given_for()
    kept = paddle.to_tensor([[0, 5, 6], [1, 2, 15], [3, 4, 9]])
    grid = grid_of(network, noisy)
    one = transform(network, noisy, timesteps, hidden, kept=kept)
    inside = np.zeros((3, 16, 1), np.float32)
    np.put_along_axis(inside, kept.numpy()[:, :, None], 1, 1)
    inside = grid.join(paddle.to_tensor(inside).expand([3, 16, 16]), None)
    other = transform(network, noisy + 100 * (1 - inside), timesteps, hidden, kept=kept)
    assert ((one != other) & (one != 0)).any() if name == "microdit" else (one == other).all()
    assert (transform(network, noisy + inside, timesteps, hidden, kept=kept) != one).any()
    every = paddle.arange(16).expand([3, 16])
    whole = transform(network, noisy, timesteps, hidden)
    np.testing.assert_array_equal(transform(network, noisy, timesteps, hidden, kept=every), whole)
    lengths = []
    block = getattr(network, {"uvit": "out_blocks", "dit": "transformer_blocks"}.get(name, "blocks"))[0]
    block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    transform(network, noisy, timesteps, hidden, kept=kept)
    assert lengths == [3 + {"uvit": 13, "single_stream": LENGTH}.get(name, 0)]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_patches_are_put_back_where_they_were(height, width, side, data):
    grid = Grid(height, width, side)
    latents = paddle.to_tensor(
        np.random.default_rng(0).standard_normal((2, 3, height * side, width * side), np.float32)
    )
    patches = grid.split(latents)
    assert (grid.join(patches, None) == latents).all()
    kept = data.draw(st.lists(st.integers(0, height * width - 1), min_size=1, unique=True).map(sorted))
    kept = paddle.to_tensor([kept, kept])
    joined = grid.split(grid.join(take_patches(patches, kept), kept))
    assert (take_patches(joined, kept) == take_patches(patches, kept)).all()
    assert abs(float(joined.abs().sum() - take_patches(patches, kept).abs().sum())) < 1e-3


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 0.99), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_which_patches_are_kept_depends_on_seed_epoch_and_row_alone(height, width, masked, seed):
    one, size = KeptPatches(16, masked), (16 * height, 16 * width)
    (count,), keys = one.shape(*size), [(0, 3), (1, 3), (0, 4)]
    drawn = one.draw(keys, size, Generators(seed), {})
    assert drawn.shape == (3, count) and count == height * width - int(height * width * masked) >= 1
    assert (np.diff(drawn) > 0).all() and drawn.min() >= 0 and drawn.max() < height * width
    for number, key in enumerate(keys):
        assert (one.draw([key], size, Generators(seed), {}) == drawn[number]).all()


def test_masks_of_epochs_differ():
    drawn = KeptPatches(8, 0.75).draw([(epoch, 7) for epoch in range(20)], (64, 64), Generators(1), {})
    assert len({tuple(row) for row in drawn}) == 20


def test_every_patch_is_kept_equally_often():
    drawn = KeptPatches(8, 0.75).draw([(0, row) for row in range(4000)], (32, 32), Generators(1), {})
    counts = np.bincount(drawn.ravel(), minlength=16)
    assert drawn.shape == (4000, 4) and abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_a_new_transformer_starts_from_zero():
    """So that the first loss of epsilon prediction is the mean square of the noise; a UViT, as published, does not."""
    noisy, timesteps, hidden, _ = given_for(4, 4)
    for name in CONFIGS:
        network, again = (build_network("transformer", config_of(name), 1) for _ in range(2))
        mine, theirs = network.state_dict(), again.state_dict()
        assert mine.keys() == theirs.keys() and all((mine[key] == theirs[key]).all() for key in mine)
        with paddle.no_grad():
            assert (transform(network, noisy, timesteps, hidden) == 0).all() == (name != "uvit")


def make_model(tiny, name):
    text_encoder = build_network("text_encoder", check_config("text_encoder", TEXT_ENCODER_CONFIG, "x"), 1)
    parts = {"vae": load_vae(tiny.vae), "transformer": build_network("transformer", config_of(name), 1)}
    return TransformerDiffusionModel(Process.of(PUBLISHED_SCHEDULE), text_encoder=text_encoder, **parts)


def batch_of(rng, count=4):
    moments = rng.standard_normal((count, 2, 4, 4, 4), dtype=np.float32)
    noise = rng.standard_normal((count, 4, 4, 4), dtype=np.float32)
    batch = {"moments": moments, "noise": noise, "posterior_noise": noise}
    batch |= {"input_ids": rng.integers(0, 50, (count, 12)), "timesteps": rng.integers(0, 1000, count)}
    return {key: paddle.to_tensor(value) for key, value in batch.items()}


def test_the_loss_is_over_the_patches_that_are_kept(tiny, name):
    model, batch = make_model(tiny, name), batch_of(np.random.default_rng(0))
    kept = paddle.to_tensor([[0, 1], [2, 3], [0, 3], [1, 2]])
    model.train()
    before = model(**batch, kept_patches=kept)
    inside = np.zeros((4, 4, 1), np.float32)
    np.put_along_axis(inside, kept.numpy()[:, :, None], 1, 1)
    inside = grid_of(model.transformer, batch["noise"]).join(paddle.to_tensor(inside).expand([4, 4, 16]), None)
    changed = {**batch, "noise": batch["noise"] + 5 * (1 - inside)}
    after = model(**changed, kept_patches=kept)
    if name != "microdit":  # whose mixer sees them
        assert float(before.value) == float(after.value) and (before.per_sample == after.per_sample).all()
    np.testing.assert_allclose(float(before.value), float(before.per_sample.mean()), rtol=1e-6)
    level = model.levels[batch["timesteps"]]
    scales = model.process.scales(level.reshape([-1, 1, 1, 1]))
    latents = model.latents(batch["posterior_noise"], moments=batch["moments"])
    from ppldm.diffusion.process import add_noise

    noisy = add_noise(latents, batch["noise"], scales)
    with paddle.no_grad():
        predicted = model.predict(noisy, batch["timesteps"], batch["input_ids"], kept=kept)
    error = ((predicted - batch["noise"]).square() * inside).sum([1, 2, 3]) / inside.sum([1, 2, 3])
    np.testing.assert_allclose(before.per_sample, error, rtol=1e-5)
    model.eval()
    assert float(model(**batch, kept_patches=kept).value) == float(model(**batch).value)


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_it_overfits(tiny, name):
    assert overfit(make_model(tiny, name), updates=200) < 0.5


@pytest.mark.needs("parity")
def test_a_dit_is_pixart_s_of_diffusers():
    import torch
    from diffusers import PixArtTransformer2DModel

    from ppldm.weights.components import to_torch_config

    for changes in ({}, {"out_channels": 8}, {"sample_size": 16}):
        network, (noisy, timesteps, hidden, mask) = randomised("dit", **{"sample_size": 8} | changes), given_for()
        own = component_of("transformer", network)
        theirs = PixArtTransformer2DModel(**to_torch_config("transformer", own.config, "x")).eval()
        state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
        theirs.load_state_dict(state)
        with torch.no_grad():
            expected = theirs(
                *(torch.tensor(one.numpy()) for one in (noisy, hidden, timesteps)),
                {"resolution": None, "aspect_ratio": None},
                encoder_attention_mask=torch.tensor(mask.numpy()),
            ).sample.numpy()  # fmt: skip
        with paddle.no_grad():
            found = transform(network, noisy, timesteps, hidden, mask)
        np.testing.assert_allclose(found, expected[:, :4], atol=1e-4)


def uvit_in_pytorch(config, state, noisy, timesteps, hidden):
    """U-ViT as published (arXiv:2209.12152, section 3 and figure 1), stated once more: [B, C, h, w]."""
    import torch
    from torch.nn import functional as F

    width, patch = config["num_attention_heads"] * config["attention_head_dim"], config["patch_size"]

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"])

    def block(name, x):
        parts = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (config["num_attention_heads"], -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(f"{name}.attn.proj", mixed)
        return x + linear(f"{name}.mlp.fc2", F.gelu(linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", x))))

    patches = F.conv2d(noisy, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    angles = timesteps[:, None] * 10000.0 ** -(torch.arange(width // 2) / (width // 2))
    time = torch.cat([angles.cos(), angles.sin()], -1)
    x = torch.cat([time[:, None], linear("context_embed", hidden), patches.flatten(2).transpose(1, 2)], 1)
    x, skips, half = x + state["pos_embed"], [], config["num_layers"] // 2
    for number in range(half):
        x = block(f"in_blocks.{number}", x)
        skips.append(x)
    x = block("mid_block", x)
    for number in range(half):
        x = block(f"out_blocks.{number}", linear(f"out_blocks.{number}.skip_linear", torch.cat([x, skips.pop()], -1)))
    x = linear("decoder_pred", norm("norm", x))[:, 1 + hidden.shape[1] :]
    x = x.unflatten(1, (noisy.shape[2] // patch, -1)).unflatten(-1, (patch, patch, -1))
    x = x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return F.conv2d(x, state["final_layer.weight"], state["final_layer.bias"], padding=1)


@pytest.mark.needs("parity")
@pytest.mark.parametrize("layers", [2, 6])
def test_a_uvit_is_the_published_one(layers):
    import torch

    network, (noisy, timesteps, hidden, _) = randomised("uvit", sample_size=8, num_layers=layers), given_for()
    own = component_of("transformer", network)
    state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
    given = [torch.tensor(one.numpy()) for one in (noisy, timesteps, hidden)]
    with paddle.no_grad():
        found = transform(network, noisy, timesteps, hidden)
    np.testing.assert_allclose(found, uvit_in_pytorch(own.config, state, *given), atol=1e-4)


def shapes_in_pytorch(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of micro_diffusion's class DiT, as its constructor makes them."""
    dim, mixer, experts = config["dim"], config["patch_mixer_dim"], config["num_experts"]

    def up(size, step):
        return (int(size) + step - 1) // step * step

    def gated(name, width, hidden):
        hidden = up(2 * int(hidden) / 3, config["multiple_of"])
        return {f"{name}.w1.weight": (hidden, width), f"{name}.w2.weight": (hidden, width),
                f"{name}.w3.weight": (width, hidden)}  # fmt: skip

    def block(name, width, qkv, mlp, has_experts):
        inner = width if qkv == 1 else up(int(width * qkv), 2 * config["head_dim"])
        made = {f"{name}.norm{number}.weight": (width,) for number in (1, 2, 3)}
        made |= {f"{name}.attn.qkv.weight": (3 * inner, width), f"{name}.attn.proj.weight": (width, inner)}
        made |= {f"{name}.cross_attn.{part}.weight": (times * width, width)
                 for part, times in (("q_linear", 1), ("kv_linear", 2), ("proj", 1))}  # fmt: skip
        made |= {f"{name}.adaLN_modulation.1.weight": (6 * width, dim), f"{name}.adaLN_modulation.1.bias": (6 * width,)}
        if not has_experts:
            return made | gated(f"{name}.mlp", width, width * mlp)
        hidden = up(int(width * mlp), config["multiple_of"])
        return made | {f"{name}.mlp.w1": (experts, width, hidden), f"{name}.mlp.w2": (experts, hidden, width),
                       f"{name}.mlp.gate.weight": (experts, width)}  # fmt: skip

    def linear(name, width, out):
        return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}

    def mlp(name, width):
        return linear(f"{name}.fc1", width, dim) | {f"{name}.norm.weight": (dim,)} | linear(f"{name}.fc2", dim, dim)

    patch = config["patch_size"]
    made = {"x_embedder.proj.weight": (dim, config["in_channels"], patch, patch), "x_embedder.proj.bias": (dim,)}
    made |= linear("t_embedder.mlp.0", 512, dim) | linear("t_embedder.mlp.2", dim, dim)
    made |= mlp("y_embedder.y_proj", config["caption_channels"]) | mlp("pooled_y_emb_process", dim)
    made |= {f"y_emb_preprocess.norm{number}.weight": (dim,) for number in (1, 2)}
    made |= {"y_emb_preprocess.attn.qkv.weight": (3 * dim, dim), "y_emb_preprocess.attn.proj.weight": (dim, dim)}
    made |= gated("y_emb_preprocess.mlp", dim, 4 * dim)
    for name, before, after in (("xin", dim, mixer), ("y", dim, mixer), ("xout", mixer, dim)):
        made |= {f"patch_mixer_map_{name}.0.weight": (before,), f"patch_mixer_map_{name}.1.weight": (after, before)}
    every, depth = config["experts_every_n"], config["depth"]
    for number in range(config["patch_mixer_depth"]):
        made |= block(f"patch_mixer.{number}", mixer, 1.0, 4.0, number % every == every - 1)
    for number in range(depth):
        qkv, ffn = (np.linspace(*config[key], num=depth)[number] for key in ("qkv_ratio", "mlp_ratio"))
        made |= block(f"blocks.{number}", dim, qkv, ffn, number % every == every - 1 and number < depth - 1)
    made |= linear("final_layer.linear", dim, patch**2 * config["in_channels"])
    return made | {"final_layer.norm_final.weight": (dim,)} | linear("final_layer.adaLN_modulation.1", dim, 2 * dim)


@pytest.mark.parametrize("config, count", [("microdit_xl2", 1_165_442_320), ("microdit_tiny", 3_309_488)])
def test_a_microdit_has_the_published_names_and_shapes(config, count):
    """1.16 billion parameters: arXiv:2407.15811, section 5."""
    config = read_new_config("transformer", CONFIG_DIR / f"{config}.json", "--transformer_config_file")
    found = {
        name: tuple(shape[::-1] if len(shape) == 2 else shape)
        for name, shape in parameter_shapes("transformer", config).items()
    }
    assert found == shapes_in_pytorch(config)
    assert sum(map(math.prod, found.values())) == count


def microdit_in_pytorch(config, state, noisy, timesteps, hidden, kept=None):
    """MicroDiT as published (arXiv:2407.15811, section 3, and its code), stated once more: [B, C, h, w]."""
    import torch
    from torch.nn import functional as F

    head, patch, dim = config["head_dim"], config["patch_size"], config["dim"]

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], eps=1e-6)

    def attend(q, k, v):
        q, k = (F.layer_norm(one, one.shape[-1:], eps=1e-6) for one in (q, k))
        q, k, v = (one.unflatten(-1, (-1, head)).transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def attention(name, x):
        return linear(f"{name}.proj", attend(*linear(f"{name}.qkv", x).chunk(3, -1)))

    def cross_attention(name, x, words):
        return linear(
            f"{name}.proj", attend(linear(f"{name}.q_linear", x), *linear(f"{name}.kv_linear", words).chunk(2, -1))
        )

    def feed_forward(name, x):
        if f"{name}.gate.weight" not in state:
            return linear(f"{name}.w3", F.silu(linear(f"{name}.w1", x)) * linear(f"{name}.w2", x))
        out, shares = torch.zeros_like(x), linear(f"{name}.gate", x).softmax(-1)
        count = max(1, int(config["expert_capacity"] * x.shape[1] / config["num_experts"]))
        for sample, expert in np.ndindex(len(x), config["num_experts"]):
            chosen = shares[sample, :, expert].argsort(descending=True)[:count]
            made = F.gelu(x[sample, chosen] @ state[f"{name}.w1"][expert]) @ state[f"{name}.w2"][expert]
            out[sample, chosen] += shares[sample, chosen, expert, None] * made
        return out

    def modulate(x, shift, scale):
        return x * (1 + scale) + shift

    def block(name, x, words, time):
        parts = linear(f"{name}.adaLN_modulation.1", F.gelu(time, approximate="tanh"))[:, None].chunk(6, -1)
        x = x + parts[2] * attention(f"{name}.attn", modulate(norm(f"{name}.norm1", x), *parts[:2]))
        x = x + cross_attention(f"{name}.cross_attn", norm(f"{name}.norm2", x), words)
        return x + parts[5] * feed_forward(f"{name}.mlp", modulate(norm(f"{name}.norm3", x), *parts[3:5]))

    def mlp(name, x):
        return linear(f"{name}.fc2", norm(f"{name}.norm", F.gelu(linear(f"{name}.fc1", x), approximate="tanh")))

    def table(place):
        angles = place.flatten()[:, None] * 10000.0 ** -(torch.arange(dim // 4) / (dim // 4))
        return torch.cat([angles.sin(), angles.cos()], -1)

    x = F.conv2d(noisy, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=patch)
    sides, base = x.shape[2:], config["sample_size"] // patch
    rows, columns = torch.meshgrid(*(torch.arange(side) / (side / base) for side in sides), indexing="ij")
    x = x.flatten(2).transpose(1, 2) + torch.cat([table(columns), table(rows)], -1)
    angles = timesteps[:, None] * 10000.0 ** -(torch.arange(256) / 256)
    time = linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], -1))
    time = linear("t_embedder.mlp.2", F.gelu(time, approximate="tanh"))
    words = mlp("y_embedder.y_proj", hidden)
    words = words + attention("y_emb_preprocess.attn", norm("y_emb_preprocess.norm1", words))
    words = words + feed_forward("y_emb_preprocess.mlp", norm("y_emb_preprocess.norm2", words))
    time = time + mlp("pooled_y_emb_process", words.mean(1))

    def mapped(name, x):
        name = f"patch_mixer_map_{name}"
        return linear(f"{name}.1", norm(f"{name}.0", x)) if f"{name}.1.weight" in state else x

    x = mapped("xin", x)
    for number in range(config["patch_mixer_depth"]):
        x = block(f"patch_mixer.{number}", x, mapped("y", words), time)
    if kept is not None:
        x = torch.stack([one[places] for one, places in zip(x, kept, strict=True)])
    x = mapped("xout", x)
    for number in range(config["depth"]):
        x = block(f"blocks.{number}", x, words, time)
    parts = linear("final_layer.adaLN_modulation.1", F.gelu(time, approximate="tanh"))[:, None].chunk(2, -1)
    x = linear("final_layer.linear", modulate(norm("final_layer.norm_final", x), *parts))
    if kept is not None:
        whole = torch.zeros(len(x), math.prod(sides), x.shape[-1])
        whole[torch.arange(len(x))[:, None], kept] = x
        x = whole
    x = x.unflatten(1, sides).unflatten(-1, (patch, patch, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.needs("parity")
@pytest.mark.parametrize(
    "changes", [{}, {"patch_mixer_dim": 32}, {"depth": 5, "experts_every_n": 3, "expert_capacity": 0.1}]
)
def test_a_microdit_is_the_published_one(changes):
    import torch

    network, (noisy, timesteps, hidden, _) = randomised("microdit", sample_size=8, **changes), given_for(8, 12)
    own = component_of("transformer", network)
    state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
    given = [torch.tensor(one.numpy()) for one in (noisy, timesteps, hidden)]
    for kept in (None, paddle.to_tensor([[0, 5, 6, 22, 23], [1, 2, 15, 16, 20], [3, 4, 9, 10, 11]])):
        with paddle.no_grad():
            found = transform(network, noisy, timesteps, hidden, kept=kept)
        places = None if kept is None else torch.tensor(kept.numpy())
        np.testing.assert_allclose(found, microdit_in_pytorch(own.config, state, *given, places), atol=1e-4)


def test_of_a_microdit_s_weights_those_of_mixers_and_experts_start_as_published():
    """micro_diffusion's `initialize_weights`."""
    network = build_network(
        "transformer", config_of("microdit", dim=64, depth=3, patch_mixer_dim=32, multiple_of=256), 1
    )
    state = network.state_dict()
    for key, std in {
        "blocks.0.attn.qkv.weight": 0.02, "blocks.2.attn.proj.weight": 0.02 / 6**0.5, "blocks.1.mlp.w1": 0.02,
        "blocks.1.mlp.w2": 0.02 / 4**0.5, "blocks.0.mlp.w2.weight": 0.02 / 2**0.5, "blocks.0.mlp.w1.weight": 0.02,
        "blocks.2.cross_attn.proj.weight": 0.02 / 6**0.5, "patch_mixer.1.mlp.w2": 0.02 / 6**0.5,
        "patch_mixer_map_xin.1.weight": (2 / 96) ** 0.5, "t_embedder.mlp.0.weight": 0.02,
        "y_emb_preprocess.mlp.w2.weight": 0.02, "y_emb_preprocess.attn.proj.weight": 0, "x_embedder.proj.bias": 0,
        "blocks.1.adaLN_modulation.1.weight": 0, "final_layer.linear.weight": 0,
    }.items():  # fmt: skip
        np.testing.assert_allclose(float(state[key].std(unbiased=False)), std, rtol=0.1, err_msg=key)
        assert abs(float(state[key].mean())) <= 0.1 * std
