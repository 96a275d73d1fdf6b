"""Every operator for CPUs against Paddle's own in float64, over shapes that are drawn; and when a layer uses which."""

import copy
import errno
import os
import subprocess
import sys
import threading
import weakref
from functools import partial

import numpy as np
import paddle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paddle import nn
from paddle.nn import functional as F
from ppdiffusers import UNet2DConditionModel
from ppdiffusers.models.attention_processor import AttnProcessor

from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config
from ppldm.networks.cpu_operators import kernels, layers, operators
from ppldm.networks.cpu_operators.layers import leave_to_paddle, use_cpu_operators
from ppldm.utils.machine import resources
from ppldm.utils.machine.cpu import keep_compiled

pytestmark = pytest.mark.skipif(not layers.operators_are_usable(), reason="they are for processors with AVX2")
BAR = 1e-5  # of the largest value; float32 has 6e-8
EXAMPLES = settings(max_examples=12, deadline=None, database=None)
SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 999)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [None if shape is None else rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def with_gradients(function, arrays, dtype, seed):
    """[result, gradient of each array] of a random sum of the results."""
    tensors = [None if one is None else paddle.to_tensor(one.astype(dtype), stop_gradient=False) for one in arrays]
    result = function(*tensors)
    weights = np.random.default_rng(seed).standard_normal(result.shape).astype(dtype)
    (result * paddle.to_tensor(weights)).sum().backward()
    return [result.numpy(), *(one.grad.numpy() for one in tensors if one is not None)]


def assert_same(operator, reference, arrays, seed=0):
    ours = with_gradients(operator, arrays, "float32", seed)
    exact = with_gradients(reference, arrays, "float64", seed)
    for number, (one, other) in enumerate(zip(ours, exact, strict=True)):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= BAR * max(1.0, np.abs(other).max()), f"number {number}"


@EXAMPLES
@given(SEEDS, SIZES, SIZES, st.integers(1, 3), st.sampled_from([1, 2, 3]), st.tuples(SIZES, SIZES), st.booleans(),
       st.tuples(*[st.integers(1, 2)] * 4), st.integers(0, 2), st.integers(0, 1))  # fmt: skip
def test_convolutions(seed, samples, channels, groups, side, size, biased, steps, padding, more):
    stride, dilation = steps[:2], steps[2:]
    height, width = (one + side * 2 for one in size)
    arrays = draw(seed, (samples, channels * groups, height, width), (2 * groups, channels, side, side),
                  (2 * groups,) if biased else None)  # fmt: skip
    assert_same(
        lambda x, w, b: operators.conv2d(x, w, b, stride, (padding, padding), dilation, groups, more),
        lambda x, w, b: F.conv2d(F.pad(x, (0, more, 0, more)), w, b, list(stride), padding, list(dilation), groups),
        arrays,
    )


@EXAMPLES
@given(SEEDS, SIZES, SIZES, SIZES)
def test_a_bias_is_added_to_its_channel(seed, samples, channels, places):
    """Whether or not a convolution of this processor does it by our kernel."""
    y, bias = draw(seed, (samples, channels, places), (channels,))
    ours = paddle.to_tensor(y)
    with_bias = paddle.to_tensor(bias)
    kernels.kernel("add_bias")(ours.data_ptr(), with_bias.data_ptr(), samples, channels, places)
    np.testing.assert_array_equal(ours.numpy(), y + bias[:, None])


@EXAMPLES
@given(SEEDS, st.lists(SIZES, min_size=1, max_size=3), SIZES, SIZES, st.booleans())
def test_linear_layers(seed, rows, inputs, outputs, biased):
    arrays = draw(seed, (*rows, inputs), (inputs, outputs), (outputs,) if biased else None)
    assert_same(operators.linear, F.linear, arrays)


def attend(query, key, value, heads, scale, added=None):
    split = [one.reshape([0, 0, heads, -1]).transpose([0, 2, 1, 3]) for one in (query, key, value)]
    scores = paddle.matmul(split[0] * scale, split[1], transpose_y=True)
    shares = F.softmax(scores if added is None else scores + added.astype(scores.dtype), -1)
    return paddle.matmul(shares, split[2]).transpose([0, 2, 1, 3]).flatten(2)


@EXAMPLES
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), SIZES, SIZES, SIZES, SIZES, st.sampled_from([None, *range(8)]),
       st.sampled_from([1, 40, 1 << 21]))  # fmt: skip
@example(0, 1, 1, 1, 2, 1, 1, None, 1 << 21)  # one row: its stride says nothing
def test_attention(seed, samples, heads, n, m, d, e, masked, at_a_time):
    """Whatever fits at a time, and whichever axes a mask has."""
    *arrays, mask = draw(seed, (samples, n, heads * d), (samples, m, heads * d), (samples, m, heads * e),
                         (samples, heads, n, m))  # fmt: skip
    added = None
    if masked is not None:
        added = paddle.to_tensor(
            mask[: samples if masked & 1 else 1, : heads if masked & 2 else 1, : n if masked & 4 else 1]
        )
    operators._attention.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_MOST_SCORES", at_a_time)
        assert_same(
            lambda q, k, v: operators.attention(q, k, v, heads, d**-0.5, added),
            lambda q, k, v: attend(q, k, v, heads, d**-0.5, added),
            arrays,
        )
    operators._attention.cache_clear()


@EXAMPLES
@given(SEEDS, SIZES, SIZES, SIZES, st.lists(SIZES, min_size=1, max_size=2), st.booleans(), st.booleans())
def test_group_norms(seed, samples, groups, width, sides, silu, shifted):
    channels = groups * width
    arrays = draw(seed, (samples, channels, *sides), (channels,), (channels,), (samples, channels) if shifted else None)

    def plain(x, weight, bias, shift):
        x = x if shift is None else x + shift.reshape([*shift.shape, *[1] * len(sides)])
        normed = F.group_norm(x.reshape([samples, channels, -1, 1]), groups, 1e-3, weight, bias).reshape(x.shape)
        return F.silu(normed) if silu else normed

    assert_same(lambda x, w, b, shift: operators.group_norm(x, w, b, groups, 1e-3, silu, shift), plain, arrays)


@EXAMPLES
@given(SEEDS, st.lists(SIZES, min_size=1, max_size=3), st.integers(2, 40), st.booleans())
def test_layer_norms(seed, rows, width, learned):
    arrays = draw(seed, (*rows, width), *[(width,) if learned else None] * 2)
    assert_same(
        lambda x, w, b: operators.layer_norm(x, w, b, 1e-3), lambda x, w, b: F.layer_norm(x, width, w, b, 1e-3), arrays
    )


@EXAMPLES
@given(SEEDS, st.lists(SIZES, min_size=1, max_size=3), st.integers(2, 40))
def test_root_mean_square_norms(seed, rows, width):
    def plain(x, w):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w

    assert_same(lambda x, w: operators.rms_norm(x, w, 1e-3), plain, draw(seed, (*rows, width), (width,)))


@EXAMPLES
@given(
    SEEDS,
    st.lists(SIZES, min_size=1, max_size=3),
    st.sampled_from(["gelu", "silu", "geglu"]),
    st.sampled_from([1, 6, 40]),
)
def test_activations(seed, shape, name, spread):
    """Over more than where they bend."""
    (x,) = draw(seed, (*shape, 6))

    def geglu(x):
        values, gates = x.chunk(2, -1)
        return values * F.gelu(gates)

    assert_same(getattr(operators, name), {"gelu": F.gelu, "silu": F.silu, "geglu": geglu}[name], [x * spread])


def test_far_from_zero_gelu_is_nothing_at_all():
    """As Paddle's: what is next to nothing has a square of nothing, and a norm divides by its root."""
    x = paddle.to_tensor([-1e30, -87.0, -20.0, -12.0, -6.0, 6.0, 12.0, 1e30])
    assert operators.gelu(x).tolist() == F.gelu(x).tolist()


UNET = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 4,
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
}


def make_unets(**settings):
    """The same UNet twice: as Paddle computes it, and by our operators."""
    paddle.seed(3)
    plain = UNet2DConditionModel(**UNET, **settings)
    ours = UNet2DConditionModel(**UNET, **settings)
    ours.set_state_dict(plain.state_dict())
    return plain, use_cpu_operators(ours)


@pytest.fixture
def unets():
    return make_unets()


def batch(seed=0):
    noisy, words = draw(seed, (2, 4, 8, 8), (2, 5, 16))
    return paddle.to_tensor(noisy), paddle.to_tensor([3, 700]), paddle.to_tensor(words)


def losses(unet, mask=None):
    noisy, timesteps, words = batch()
    noisy.stop_gradient = words.stop_gradient = False
    result = unet(noisy, timesteps, words, encoder_attention_mask=mask).sample
    result.square().mean().backward()
    found = [result, noisy.grad, words.grad, *(one.grad for one in unet.parameters() if one.grad is not None)]
    found = [one.numpy().copy() for one in found]
    unet.clear_gradients()
    return found


def assert_close(ours, plain, bar=BAR):
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert np.abs(one - other).max() <= bar * max(1.0, np.abs(other).max())


@pytest.mark.parametrize("masked", [False, True])
def test_a_network_is_the_same_with_them(unets, masked):
    mask = paddle.to_tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]) if masked else None
    plain, ours = (losses(unet, mask) for unet in unets)
    assert_close(ours, plain)
    assert any((one != other).any() for one, other in zip(ours, plain, strict=True))  # they were used
    assert [name for name, _ in unets[1].named_parameters()] == [name for name, _ in unets[0].named_parameters()]


@pytest.mark.parametrize(
    "changes",
    [{"data_format": "NHWC"}, {"addition_embed_type": "text", "addition_embed_type_num_heads": 4}],
    ids=["channels last", "pooled captions"],
)
def test_a_setting_changes_nothing_of_it(changes):
    plain, ours = map(losses, make_unets(**changes))
    assert_close(ours, plain)


def scaled(called, name, _layer, _given, out):
    called.append(name)
    return 1.5 * out


def test_what_a_hook_changes_is_changed(unets):
    """Of every layer that stands for itself elsewhere, as adapters need it."""
    found = []
    for unet in unets:
        called, hooks = [], []
        for name, layer in unet.named_sublayers():
            if isinstance(layer, (nn.Conv2D, nn.Linear, nn.GroupNorm, nn.LayerNorm)):
                hook = partial(scaled, called, name)
                hooks.append(layer.register_forward_post_hook(hook))
        found.append((called, losses(unet)))
        [hook.remove() for hook in hooks]
    assert found[0][0] == found[1][0]
    assert_close(found[1][1], found[0][1])


def test_an_autoencoder_is_the_same_with_them():
    plain = build_network("vae", read_new_config("vae", "vae_tiny", ""), seed=0)
    ours = copy.deepcopy(plain)
    for layer in plain.sublayers():
        leave_to_paddle(layer)
        if hasattr(layer, "processor"):
            layer.set_processor(AttnProcessor())
    found = []
    for one in (plain, ours):
        (pixels,) = draw(0, (2, 3, 48, 32))
        one.decode(one.encode(paddle.to_tensor(pixels)).latent_dist.mean).sample.square().mean().backward()
        found.append([parameter.grad.numpy() for parameter in one.parameters()])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("layer, shape", [(nn.Linear(4, 6), [3, 4]), (nn.Conv2D(4, 6, 3), [2, 4, 5, 5])])
def test_other_precisions_and_no_rows_are_left_to_paddle(layer, shape):
    ours = use_cpu_operators(copy.deepcopy(layer))
    assert 0 in ours(paddle.randn([0, *shape[1:]])).shape
    x = paddle.randn(shape).astype("float64")
    assert (ours.to(dtype="float64")(x) == type(ours).forward(ours, x)).all()


def test_traced_graphs_are_left_to_paddle():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            layer = use_cpu_operators(nn.Sequential(nn.Conv2D(3, 8, 3), nn.GroupNorm(2, 8), nn.Silu()))
            assert layer(paddle.static.data("x", [1, 3, 8, 8])).shape == [1, 8, 6, 6]
    finally:
        paddle.disable_static()


@pytest.mark.parametrize("frozen", ["all", "norm", "bias"])
def test_frozen_weights_get_no_gradient(unets, frozen):
    """And whatever is learned gets the same as before."""
    for unet in unets:
        for name, parameter in unet.named_parameters():
            parameter.stop_gradient = frozen == "all" or frozen in name
    plain, ours = (losses(unet) for unet in unets)
    assert_close(ours, plain)


def test_a_copy_computes_with_its_own_weights(unets):
    _, ours = unets
    copied = copy.deepcopy(ours)
    before = losses(copied)
    for parameter in ours.parameters():
        parameter.set_value(parameter * 2)
    assert all((one == other).all() for one, other in zip(losses(copied), before, strict=True))


def test_threads_of_python_do_not_disturb_one_another(unets):
    _, ours = unets
    alone = [ours(*batch(seed)).sample.numpy() for seed in range(4)]
    wrong = []

    def work(seed):
        for _ in range(5):
            if (ours(*batch(seed)).sample.numpy() != alone[seed]).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert not wrong


@pytest.mark.parametrize("operator", [operators.silu, operators.geglu])
def test_gradients_of_gradients_are_refused(operator):
    """They would be missing without a word."""
    x = paddle.ones([2, 4])
    x.stop_gradient = False
    with pytest.raises(OSError, match="no gradients of gradients"):  # as Paddle passes an error on
        paddle.grad(operator(x).sum(), [x], create_graph=True)


def test_what_does_not_fit_is_refused_and_not_read_beyond_its_end():
    z = paddle.zeros
    for call in (
        lambda: operators.linear(z([2, 4]), z([5, 3]), None),
        lambda: operators.conv2d(z([1, 4, 5, 5]), z([6, 3, 3, 3]), None, (1, 1), (1, 1), (1, 1), 1),
        lambda: operators.attention(z([2, 3, 8]), z([1, 3, 8]), z([1, 3, 8]), 2, 1.0),
        lambda: operators.attention(z([2, 3, 8]), z([2, 3, 4]), z([2, 3, 8]), 2, 1.0),
        lambda: operators.attention(z([2, 3, 8]), z([2, 3, 8]), z([2, 4, 8]), 2, 1.0),
        lambda: operators.attention(z([2, 3, 8]), z([2, 5, 8]), z([2, 5, 8]), 2, 1.0, z([2, 1, 1, 4])),
        lambda: operators.attention(z([2, 3, 8]), z([2, 5, 8]), z([2, 5, 8]), 2, 1.0, z([3, 1, 1, 5])),
        lambda: operators.group_norm(z([2, 6, 5]), z([4]), z([4]), 2, 1e-5),
        lambda: operators.group_norm(z([2, 4, 5]), z([4]), z([4]), 2, 1e-5, True, z([1, 4])),
        lambda: operators.layer_norm(z([2, 6]), z([4]), z([4]), 1e-5),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            call()


def test_one_variable_turns_them_off(monkeypatch):
    assert layers.operators_are_usable()
    monkeypatch.setenv("PPLDM_NO_CPU_TUNING", "1")
    assert not layers.operators_are_usable()


def test_a_processor_with_less_keeps_paddles(monkeypatch):
    monkeypatch.setattr(resources, "read_cpu", lambda key: "avx fma")
    assert not layers.operators_are_usable()


def test_another_paddle_gets_its_own_operators(monkeypatch):
    """They were compared with this version's layers: with another one, compare them before VERSION is changed."""
    monkeypatch.setattr(paddle, "__version__", "3.4.0")
    assert not layers.operators_are_usable()


@EXAMPLES
@given(SEEDS, st.sampled_from([24, 128, 1024]), st.sampled_from([8, 24, 512]), st.integers(1, 96))
def test_a_row_has_the_same_bits_among_any_number_of_rows(seed, inputs, outputs, rows):
    """So that what is computed ahead, in other batches, is what a training would compute."""
    x, weight, bias = (paddle.to_tensor(one) for one in draw(seed, (96, inputs), (inputs, outputs), (outputs,)))
    assert (operators.linear(x[:rows], weight, bias) == operators.linear(x, weight, bias)[:rows]).all()
    pictures, kernel = (paddle.to_tensor(one) for one in draw(seed, (8, 6, 5, 5), (7, 6, 3, 3)))
    count, geometry = 1 + rows % 8, ((1, 1), (1, 1), (1, 1), 1)
    few, all_of_them = (operators.conv2d(one, kernel, None, *geometry) for one in (pictures[:count], pictures))
    assert (few == all_of_them[:count]).all()
    few, all_of_them = (
        operators.attention(one, one, one, 4, 0.5)
        for one in (x[: count * 4].reshape([count, 4, -1]), x[:32].reshape([8, 4, -1]))
    )
    assert (few == all_of_them[:count]).all()


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(errno.ENOSPC, "no space left")])
def test_a_kernel_is_compiled_where_nothing_can_be_kept(error):
    def compiler(**settings):
        if settings:
            raise error
        return lambda share: ("compiled", share)

    assert keep_compiled(compiler, kernels.silu) == ("compiled", kernels.silu)


@pytest.mark.cold
@pytest.mark.parametrize("vectors", ["ALL", "AVX2"])
def test_no_bit_depends_on_the_number_of_threads_or_on_the_rows_beside(vectors):
    """By all that this processor has, and, of more operators, as on one with AVX2, where the threads share products."""
    program = """
import os, zlib, numpy as np, paddle
from ppldm.networks.cpu_operators import operators
x, w, b = (paddle.to_tensor(np.random.default_rng(n).standard_normal(s).astype("float32"), stop_gradient=False)
           for n, s in enumerate(((3, 330, 7, 5), (330,), (330,))))
rows, wide = lambda: x.reshape([3, 35, 330]), w.detach().reshape([330, 1]).tile([1, 24])
shared = os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
kernel = wide.T.reshape([24, 330, 1, 1])
convolve = lambda x: operators.conv2d(x, kernel, wide[0], (1, 1), (0, 0), (1, 1), 1)
attend = [lambda one, heads=heads: operators.attention(one, one, one, heads, 0.1) for heads in (1, 3)]
for make in (
    lambda: operators.group_norm(x, w, b, 6, 1e-5, True), lambda: operators.layer_norm(rows(), w, b, 1e-5),
    lambda: operators.rms_norm(rows(), w, 1e-5), lambda: operators.linear(rows(), wide, None),
    lambda: operators.geglu(rows()), lambda: operators.gelu(x), lambda: operators.silu(x),
    *((lambda: convolve(x), *(lambda one=one: one(rows()) for one in attend)) if shared else ()),
):
    y = make()
    y.square().sum().backward()
    print(*(zlib.crc32(one.numpy().tobytes()) for one in (y, x.grad, w.grad, b.grad) if one is not None))
flat = rows().flatten(0, 1)
for make, given, counts in (
    (lambda one: operators.linear(one, wide, wide[0]), flat, (1, 9, 12, 13, 40, 90)), (convolve, x, (1, 2)),
    *((one, rows(), (1, 2)) for one in attend),
) if shared else ():
    print(all(bool((make(given[:count]) == make(given)[:count]).all()) for count in counts))
"""
    said = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                       env={**os.environ, "OMP_NUM_THREADS": threads, "ONEDNN_MAX_CPU_ISA": vectors}).stdout
        for threads in ("1", "2", "3")
    ]  # fmt: skip
    count, trues = (14, 4) if vectors == "AVX2" else (7, 0)
    assert said[0].count("\n") == count and said[0].count("True") == trues and said[0] == said[1] == said[2]


@pytest.mark.cold
@pytest.mark.parametrize("threads", ["1", "2"])
def test_signals_change_no_bit_and_break_nothing(threads):
    """Ctrl-C, a scheduler's signal, the end of a loader process: one every 0.3 ms, at any moment of an operation."""
    program = """
import signal, zlib, numpy as np, paddle
from pathlib import Path
from ppldm.networks.cpu_operators import operators
signal.signal(signal.SIGALRM, lambda number, frame: None)

def draw(*shape):
    return paddle.to_tensor(np.random.default_rng(0).standard_normal(shape).astype("float32"), stop_gradient=False)

rows, matrix, bias, pictures, one, three = (draw(142, 154), draw(154, 226), draw(226), draw(2, 64, 32, 32),
                                            draw(226, 64, 1, 1), draw(226, 64, 3, 3))
for make in (
    lambda: operators.linear(rows, matrix, bias),
    lambda: operators.conv2d(pictures, one, bias, (1, 1), (0, 0), (1, 1), 1),
    lambda: operators.conv2d(pictures, three, bias, (1, 1), (1, 1), (1, 1), 1),
):
    found = set()
    for number in range(100):
        y = make()
        y.square().sum().backward()
        tensors = (rows, matrix, bias, pictures, one, three)
        found.add(tuple(zlib.crc32(x.numpy().tobytes()) for x in (y, *(t.grad for t in tensors if t.grad is not None))))
        for tensor in tensors:
            tensor.clear_gradient(set_to_zero=False)
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(found))
said = [task.joinpath("status").read_text() for task in Path("/proc/self/task").iterdir()]
masks = [text.partition("SigBlk:")[2].split()[0] for text in said]
print(sum(int(mask, 16) >> signal.SIGALRM - 1 & 1 for mask in masks))  # threads that compute beside this one
"""
    environ = {**os.environ, "OMP_NUM_THREADS": threads}
    told = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert told.stdout.split() == ["1", "1", "1", str(int(threads) - 1)], told


@EXAMPLES
@given(SEEDS, st.lists(st.integers(1, 700), min_size=1, max_size=9), st.integers(1, 50), st.sampled_from([0.0, 0.1]),
       st.sampled_from([1e-3, 1.0, 1e4]))  # fmt: skip
def test_updates_of_weights(seed, sizes, update, decay, scale):
    """AdamW, and the moving average, of several tensors; some elements never had a gradient."""
    given = [draw(seed + k, *[(size,) for size in sizes]) for k in range(5)]
    weights, gradients, first, second, averages = given
    gradients = [one * np.float32(scale) * (np.arange(one.size) % 7 > 0) for one in gradients]
    first = [np.float32(0.1 * scale) * one * (np.arange(one.size) % 7 > 0) for one in first]
    second = [np.float32(0.01 * scale**2) * one**2 * (np.arange(one.size) % 7 > 0) for one in second]
    rate, beta1, beta2, epsilon = 1e-3, 0.9, 0.999, 1e-8
    norms = operators.squared_norms([paddle.to_tensor(one.astype(np.float32)) for one in gradients])
    np.testing.assert_allclose(
        [float(one) for one in norms], [(one.astype(np.float64) ** 2).sum() for one in gradients], rtol=1e-6
    )
    tensors = [[paddle.to_tensor(one.astype(np.float32)) for one in arrays]
               for arrays in (weights, gradients, first, second, averages)]  # fmt: skip
    powers = beta1**update, beta2**update
    operators.update_by_adamw(*tensors[:4], rate, (beta1, beta2), powers, epsilon, decay)
    for w, g, m, v, tensor in zip(weights, gradients, first, second, zip(*tensors, strict=True), strict=True):
        w, g, m, v = (one.astype(np.float64) for one in (w, g, m, v))
        terms = beta1 * np.abs(m) + (1 - beta1) * np.abs(g)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        ratio = rate / (1 - powers[0]) / (np.sqrt(v / (1 - powers[1])) + epsilon)
        assert_near(tensor[2], m, terms)
        assert_near(tensor[3], v, v)
        assert_near(tensor[0], w * (1 - rate * decay) - ratio * m, np.abs(w) + ratio * terms)
    operators.average(tensors[4], tensors[0], 0.125)
    for start, value, found in zip(averages, tensors[0], tensors[4], strict=True):
        start, value = start.astype(np.float64), value.numpy().astype(np.float64)
        assert_near(found, start * 0.875 + value * 0.125, np.abs(start) + np.abs(value))


def assert_near(found, exact, terms):
    """Each element, whose error is measured by the sizes of what it is a sum of: the sum may be near zero."""
    assert (np.abs(found.numpy() - exact) <= 1e-6 * terms).all()


def test_what_an_operator_reads_is_there_until_it_has_run(monkeypatch):
    """A copy of strided data that nobody holds gives its memory back, which another thread may take, or the system."""
    copies = []

    def copied(tensor):
        copy = tensor.clone()
        copies.append(weakref.ref(copy))
        return copy

    def check_alive(run):
        def checked(*numbers):
            assert copies and all(copy() is not None for copy in copies[-1:])
            run(*numbers)

        return checked

    kernel = operators.kernel
    monkeypatch.setattr(operators, "_whole", copied)
    monkeypatch.setattr(operators, "kernel", lambda name: check_alive(kernel(name)))
    x, channels = paddle.randn([2, 4, 6]), paddle.ones([4])
    x.stop_gradient = False
    for result in (
        operators.group_norm(x, channels, channels, 2, 1e-5),
        operators.layer_norm(x, paddle.ones([6]), paddle.zeros([6]), 1e-5),
        operators.geglu(x),
        operators.gelu(x),
        operators.silu(x),
    ):
        result.sum().backward()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 127, 5000])
def test_the_norm_of_what_is_not_finite_is_not_finite(bad, size):
    for place in {0, size // 2, size - 1}:
        values = np.ones(size, np.float32)
        values[place] = bad
        found = operators.squared_norms([paddle.ones([3]), paddle.to_tensor(values)])
        assert found[0] == 3 and not np.isfinite(float(found[1]))
