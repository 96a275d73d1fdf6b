"""Muon is its formula, in float64 by numpy, for matrices and convolutions; all else is AdamW's, to the bit."""

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from toy_runs import seal

from ppldm.methods.muon import find_matrices, is_hidden_matrix, muon, orthogonalized
from ppldm.training.checkpoint import read_manifest
from ppldm.training.optimizer import CpuAdamW, FusedAdamW, parameter_of
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import CheckpointError, ConfigError

KINDS = [paddle.optimizer.AdamW, FusedAdamW, CpuAdamW]
RATE, DECAY = 1e-2, 0.1
LAYERS = {
    "body.tall": lambda: paddle.nn.Linear(24, 5),
    "body.wide": lambda: paddle.nn.Linear(5, 24),
    "body.square": lambda: paddle.nn.Linear(8, 8),
    "body.convolution": lambda: paddle.nn.Conv2D(6, 10, 3),
    "body.few": lambda: paddle.nn.Conv2D(2, 40, 3),
    "body.strided": lambda: paddle.nn.Conv2DTranspose(4, 6, 2, 2),
    "attn.qkv": lambda: paddle.nn.Linear(8, 12),
    "body.experts": lambda: Experts(),
    "conv_in": lambda: paddle.nn.Conv2D(4, 6, 3),
    "body.depthwise": lambda: paddle.nn.Conv2D(6, 6, 3, groups=6),
    "body.token_embedding": lambda: paddle.nn.Embedding(9, 4),
}
PIECES = {"attn.qkv": 3}
BY_ADAMW = {"conv_in", "body.depthwise", "body.token_embedding"}


class Experts(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.w1 = self.create_parameter([3, 6, 10])


def normals(seed: int, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make(seed: int = 0) -> dict:
    """Parameters of all layers, by their names in a model of one component."""
    with paddle.utils.unique_name.guard():
        layers = {name: layer() for name, layer in LAYERS.items()}
    found = {f"unet.{name}.{leaf}": one for name, layer in layers.items() for leaf, one in layer.named_parameters()}
    for number, parameter in enumerate(found.values()):
        parameter.set_value(normals(seed + number, parameter.shape))
    return found


def updated(kind, parameters: dict, num_updates: int = 3, state=None, begin: int = 0):
    """The optimizer after updates by drawn gradients."""
    spared = next(one.name for name, one in parameters.items() if name == "unet.body.square.weight")
    optimizer = kind(
        RATE, parameters=[*parameters.values()], weight_decay=DECAY, apply_decay_param_fun=lambda name: name != spared
    )
    if state:
        optimizer.set_state_dict(state)
    for update in range(begin, num_updates):
        for number, parameter in enumerate(parameters.values()):
            parameter.clear_gradient(False)
            (parameter * paddle.to_tensor(normals(1000 * (update + 1) + number, parameter.shape))).sum().backward()
        optimizer.step()
    return optimizer


def expected(name: str, weight: np.ndarray, gradients: list, momentum: float, nesterov: bool) -> np.ndarray:
    """The weight after updates by `gradients`, as published, in float64."""
    weight, moment = weight.astype(np.float64), 0.0
    for gradient in gradients:
        moment = momentum * moment + gradient  # Jordan's first form, without (1 - m): only the direction matters
        update = gradient + momentum * moment if nesterov else moment
        pieces = [update]
        if name in PIECES:
            pieces = np.split(update, PIECES[name], axis=1)
        elif update.ndim == 3:
            pieces = [*update]
        made = [published(one.reshape(len(one), -1)).reshape(one.shape) for one in pieces]
        made = np.stack(made) if update.ndim == 3 else np.concatenate(made, axis=1)
        decay = 0.0 if name == "body.square" else DECAY
        weight = weight - RATE * (decay * weight + made)
    return weight


def published(matrix: np.ndarray) -> np.ndarray:
    """By the singular values of the matrix, which the iteration maps by its polynomial one by one."""
    u, values, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return 0.2 * np.sqrt(max(matrix.shape)) * (u * values) @ v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum, nesterov", [(0.95, True), (0.6, False)])
def test_matrices_are_updated_as_published_and_all_else_by_adamw_to_the_bit(kind, momentum, nesterov):
    before, found, plain = make(), make(), make()
    updated(muon(kind, found, momentum, nesterov), found)
    updated(kind, plain)
    for number, (name, parameter) in enumerate(found.items()):
        layer, _, leaf = name.removeprefix("unet.").rpartition(".")
        if leaf == "bias" or layer in BY_ADAMW:
            assert (parameter.numpy() == plain[name].numpy()).all(), name
        else:
            gradients = [normals(1000 * update + number, parameter.shape).astype(np.float64) for update in (1, 2, 3)]
            wanted = expected(layer, before[name].numpy(), gradients, momentum, nesterov)
            np.testing.assert_allclose(parameter.numpy(), wanted, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(7, 7), (64, 64), (200, 30), (30, 200), (16, 1000)])
def test_singular_values_end_near_one(shape):
    matrix = normals(sum(shape), shape)
    values = np.linalg.svd(matrix, compute_uv=False)
    made = np.linalg.svd(orthogonalized(paddle.to_tensor(matrix)).numpy(), compute_uv=False)
    kept = (values > 0.002 * np.sqrt((values**2).sum())).sum()
    assert kept > 0.95 * min(shape) and made.max() < 1.21 and np.sort(made)[-kept:].min() > 0.68


def test_a_matrix_without_a_gradient_moves_by_its_decay_alone():
    assert not orthogonalized(paddle.zeros([4, 6])).numpy().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_one_moment_and_goes_on_from_it_to_the_bit(kind):
    straight, halves = make(), make()
    kinds = [muon(kind, parameters, 0.95, True) for parameters in (straight, halves)]
    with paddle.utils.unique_name.guard():
        state = updated(kinds[0], straight, 4).state_dict()
    with paddle.utils.unique_name.guard():
        first = updated(kinds[1], halves, 2).state_dict()
    with paddle.utils.unique_name.guard():
        second = updated(kinds[1], halves, 4, first, begin=2).state_dict()
    assert state.keys() == second.keys() and all((state[key].numpy() == second[key].numpy()).all() for key in state)
    assert all((straight[name].numpy() == halves[name].numpy()).all() for name in straight)
    for name, parameter in straight.items():
        held = [value.size for key, value in state.items() if parameter_of(key) == parameter.name]
        own = parameter.name in find_matrices(straight)
        assert sum(held) == (parameter.size if own else 2 * parameter.size + 2), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_master_learns_as_a_float32_weight_and_is_rounded(dtype):
    """As with O2, whose gradients are float32 too."""
    weights, state = [], []
    for half in (True, False):
        with paddle.utils.unique_name.guard():
            layer = paddle.nn.Linear(8, 6, bias_attr=False)
            layer.weight.set_value(paddle.to_tensor(normals(1, [8, 6])).astype(dtype).astype("float32"))
            layer.to(dtype=dtype if half else "float32")
            parameters = {"unet.body.weight": layer.weight}
            kind = muon(paddle.optimizer.AdamW, parameters, 0.95, True)
            optimizer = kind(RATE, parameters=[layer.weight], weight_decay=DECAY, multi_precision=True)
            with paddle.no_grad():  # as `step`
                for seed in (2, 3):
                    optimizer._create_optimization_pass([(layer.weight, paddle.to_tensor(normals(seed, [8, 6])))])
        weights.append(layer.weight)
        state.append(optimizer.state_dict())
    (master,) = state[0].pop("master_weights").values()
    assert (master.numpy() == weights[1].numpy()).all() and weights[0].dtype == getattr(paddle, dtype)
    assert (weights[0].astype("float32").numpy() == master.astype(dtype).astype("float32").numpy()).all()
    ((key, one),), (other,) = state[0].items(), state[1].values()
    assert parameter_of(key) == weights[0].name and (one.numpy() == other.numpy()).all()


@pytest.mark.parametrize(
    "name, shape, found",
    [
        ("down_blocks.0.resnets.0.conv1.weight", [64, 64, 3, 3], True),
        ("time_embedding.linear_1.weight", [64, 256], True),
        ("down_blocks.0.attentions.0.proj_out.weight", [64, 64, 1, 1], True),
        ("conv_out.weight", [8, 64, 3, 3], False),
        ("encoder.conv_in.weight", [16, 3, 3, 3], False),
        ("proj_out.weight", [128, 16], False),
        ("transformer_blocks.0.scale_shift_table", [6, 128], False),
        ("pos_embed", [1, 29, 128], False),
        ("patch_mixer.1.mlp.w1", [4, 96, 384], True),
        ("text_model.embeddings.position_embedding.weight", [12, 128], False),
        ("main.0.weight", [64, 3, 4, 4], False),
        ("main.2.weight", [128, 64, 4, 4], True),
        ("main.11.weight", [1, 512, 4, 4], False),
        ("down_blocks.0.0.channelwise.2.gamma", [1, 1, 1, 128], False),
        ("down_blocks.0.0.depthwise.weight", [64, 1, 3, 3], False),
        ("mid_block.attentions.0.to_q.down", [64, 4], False),
        ("conv_norm_out.bias", [64], False),
    ],
)
def test_what_is_a_matrix_inside_a_network(name, shape, found):
    assert is_hidden_matrix(name, shape) == found


def test_components_may_have_layers_of_the_same_name():
    both = {f"{component}.body.{leaf}": one for component in ("unet", "controlnet")
            for leaf, one in paddle.nn.Linear(4, 6).named_parameters()}  # fmt: skip
    assert set(find_matrices(both)) == {both[f"{name}.body.weight"].name for name in ("unet", "controlnet")}


@pytest.mark.parametrize(
    "first, then, recorded", [("adamw", "muon", True), ("muon", "adamw", True), ("adamw", "muon", False)]
)
def test_no_optimizer_goes_on_from_the_other_s_state(tiny, tmp_path, first, then, recorded):
    def prepared(**changes):
        return prepare(*parse_arguments(tiny.flags(tmp_path, max_steps=1, save_steps=1, **changes), loop=True))

    run_loop(prepared(optimizer=first))
    if not recorded:  # before there was a choice
        identity = read_manifest(tmp_path / "checkpoint-1")["identity"]
        del identity["optimizer"]
        seal(tmp_path / "checkpoint-1", identity=identity)
    told = f"with optimizer {first}, this run has {then}; that cannot be accepted: .* has no optimizer state for"
    with pytest.raises(CheckpointError, match=told):
        prepared(optimizer=then)


def test_adapters_are_refused_by_name(tiny, tmp_path):
    words = tiny.flags(tmp_path / "run", optimizer="muon", lora_rank=2)
    with pytest.raises(ConfigError, match="--lora_rank and --train_tokens train no whole matrix; omit --optimizer"):
        prepare(*parse_arguments(words, loop=True))
    assert not (tmp_path / "run").exists()
