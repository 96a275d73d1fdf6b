"""Float32 operators for CPUs in Paddle's autograd: products of matrices by oneDNN, all else by kernels of numba.

They compute what Paddle's own do, but for rounding; the last bits of the gradients of a convolution's or a linear
layer's weights depend on the number of threads, as those of Paddle's do. Gradients come by `backward()`: `paddle.grad`
of a few tensors fails in Paddle 3.3 where it passes through operators in Python, and there are none of gradients.
"""

from ctypes import c_int
from functools import cached_property, lru_cache
from math import prod

import paddle
from paddle.autograd import PyLayer

from .kernels import kernel
from .onednn import (
    DIRECT,
    FORWARD,
    LOCK,
    NONE,
    SOFTMAX,
    Operation,
    ReorderedOperation,
    any_layout,
    is_own_product,
    layout,
    num_threads,
    numbers,
    scratch,
)
from .products import over_channels, products, rows_by_matrix

_MOST_PLANS = 512  # of each kind; one holds some 50 kB
_LAST = c_int(3)  # the axis of softmax
_MOST_SCORES = 1 << 21  # of attention that are in memory at a time: 8 MB


def _new(shape):
    return paddle._C_ops.empty(shape, paddle.float32, paddle.CPUPlace())


def _whole(x):
    return x if x.is_contiguous() else x.contiguous()


def _learned(*tensors) -> tuple[bool, ...]:
    """Which of an operator's tensors get a gradient."""
    return tuple(not tensor.stop_gradient for tensor in tensors if tensor is not None)


def _gradients(learned: tuple[bool, ...], *gradients):
    """Those that Paddle takes: of each tensor, None where it gets none. Raises RuntimeError where a graph of them is
    asked for, which they would not be in."""
    if paddle.is_grad_enabled():
        raise RuntimeError("operators for CPUs have no gradients of gradients; PPLDM_NO_CPU_TUNING=1 does without them")
    return tuple(one if wanted else None for one, wanted in zip(gradients, learned, strict=True))


def _require(fits: bool, *shapes) -> None:
    """Raises ValueError: what does not fit would be read beyond its end."""
    if not fits:
        raise ValueError(f"tensors of shapes {', '.join(str(list(shape)) for shape in shapes)} do not fit together")


def _addresses(*tensors) -> list[int]:
    """They hold while somebody has the tensors: a copy wants a name until the operator has run."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class _ConvolutionPlan:
    """Of one layer's shapes, as all plans; operations are made when they are first needed.

    x [B, I, H, W], weight [O, I / groups, h, w], y [B, O, H', W']."""

    def __init__(self, x, weight, y, with_bias, stride, before, after, dilation, groups, threads):
        if groups > 1:
            weight = (groups, weight[0] // groups, *weight[1:])
        self.shapes = {"src": x, "weights": weight, **({"bias": y[1:2]} if with_bias else {}), "dst": y}
        # Of 1 x 1 a product of matrices, for which no copy in another layout is worth it.
        of = layout if weight[-2:] == (1, 1) else any_layout
        self.x, self.weight, self.y, self.bias = of(x), of(weight), of(y), layout(y[1:2]) if with_bias else NONE
        self.geometry = numbers(stride), numbers(d - 1 for d in dilation), numbers(before), numbers(after)
        self.is_product = (*weight[-2:], *stride, *before, *after, groups) == (1, 1, 1, 1, 0, 0, 0, 0, 1)

    @cached_property
    def _forward(self):
        described = FORWARD, DIRECT, self.x, self.weight, self.bias, self.y, *self.geometry, NONE
        return ReorderedOperation("convolution_forward", described, self.shapes, ("dst",))

    def _as_product(self, x: str):
        """From "src", or back from "dst", by products, where these are exact and the library's convolution is not."""
        if not self.is_product or not is_own_product(self._forward.operation.description):
            return None
        outputs, inputs = self.shapes["weights"][:2]
        weight = ((outputs, inputs), (inputs, 1)) if x == "src" else ((inputs, outputs), (1, inputs))
        return over_channels(self.shapes[x], weight)

    @cached_property
    def forward(self):
        return self._as_product("src") or self._forward

    @cached_property
    def to_x(self):
        if product := self._as_product("dst"):
            return lambda dx, weight, dy: product(dy, weight, dx)
        hint = self._forward.operation.description
        shapes = {"diff_src": self.shapes["src"], "weights": self.shapes["weights"], "diff_dst": self.shapes["dst"]}
        described = DIRECT, self.x, self.weight, self.y, *self.geometry, hint, NONE
        return ReorderedOperation("convolution_backward_data", described, shapes, ("diff_src",))

    @cached_property
    def to_weight(self):
        hint = self._forward.operation.description
        shapes = {name if name == "src" else f"diff_{name}": shape for name, shape in self.shapes.items()}
        described = DIRECT, self.x, self.weight, self.bias, self.y, *self.geometry, hint, NONE
        return ReorderedOperation("convolution_backward_weights", described, shapes, ("diff_weights", "diff_bias"))


class _LinearPlan:
    """x [R, I], weight [I, O], y [R, O]. As products of matrices; the library's inner products round a row otherwise
    among others, but give the gradients of weight and bias in one."""

    def __init__(self, rows, inputs, outputs, with_bias, threads):
        self.rows, self.with_bias, self.outputs = rows, with_bias, outputs
        self.weight, self.turned = ((inputs, outputs), (outputs, 1)), ((outputs, inputs), (1, outputs))

    @cached_property
    def forward(self):
        return rows_by_matrix(self.rows, self.weight, self.with_bias)

    @cached_property
    def _to_x(self):
        return rows_by_matrix(self.rows, self.turned, False)

    def to_x(self, dx, weight, dy) -> None:
        self._to_x(dy, weight, dx)

    @cached_property
    def to_weight(self):
        x, y, turned = layout((self.rows, self.weight[0][0])), layout((self.rows, self.outputs)), layout(*self.turned)
        bias = layout((self.outputs,)) if self.with_bias else NONE
        hint = Operation("inner_product_forward", (FORWARD, x, turned, bias, y, NONE), {})
        described = x, turned, bias, y, hint.description, NONE
        biases = {"diff_bias": bias} if self.with_bias else {}
        tensors = {"src": x, "diff_weights": turned, **biases, "diff_dst": y}
        return Operation("inner_product_backward_weights", described, tensors)


_convolution, _linear = lru_cache(_MOST_PLANS)(_ConvolutionPlan), lru_cache(_MOST_PLANS)(_LinearPlan)


class _Weighted(PyLayer):
    """A layer with a weight and perhaps a bias, by a plan."""

    @staticmethod
    def forward(ctx, given, weight, bias, plan, shape):
        ctx.plan, ctx.learned = plan, _learned(given, weight, bias)
        x, weight, y = _whole(given), _whole(weight), _new(shape)
        with LOCK:
            plan.forward(*_addresses(x, weight, *(() if bias is None else (bias,)), y))
        ctx.save_for_backward(x, weight, bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensor()
        dy, dx, dweight, dbias = _whole(dy), None, None, [None] * (len(ctx.learned) - 2)
        with LOCK:
            if ctx.learned[0]:
                dx = _new(x.shape)
                ctx.plan.to_x(*_addresses(dx, weight, dy))
            if any(ctx.learned[1:]):
                dweight, dbias = _new(weight.shape), [] if bias is None else [_new(bias.shape)]
                ctx.plan.to_weight(*_addresses(x, dweight, *dbias, dy))
        return _gradients(ctx.learned, dx, dweight, *dbias)


def conv2d(x, weight, bias, stride, padding, dilation, groups, more=0):
    """[B, I, H, W] by weight [O, I / groups, h, w] and bias [O] or None; the rest as pairs. more: how much wider the
    padding is below and at the right than above and at the left."""
    after = tuple(one + more for one in padding)
    sides = (
        (side + before + behind - d * (kernel_side - 1) - 1) // s + 1
        for side, kernel_side, s, before, behind, d in zip(
            x.shape[2:], weight.shape[2:], stride, padding, after, dilation, strict=True
        )
    )
    _require(x.shape[1] == groups * weight.shape[1], x.shape, weight.shape)
    shape = x.shape[0], weight.shape[0], *sides
    shapes = tuple(x.shape), tuple(weight.shape), shape, bias is not None
    plan = _convolution(*shapes, stride, padding, after, dilation, groups, num_threads())
    return _Weighted.apply(x, weight, bias, plan, shape)


def linear(x, weight, bias):
    """[..., I] by weight [I, O] and bias [O] or None."""
    *rows, inputs = x.shape
    _require(inputs == weight.shape[0], x.shape, weight.shape)
    plan = _linear(prod(rows), inputs, weight.shape[1], bias is not None, num_threads())
    return _Weighted.apply(x, weight, bias, plan, [*rows, weight.shape[1]])


class _AttentionPlan:
    """Queries [B, N, H D], keys [B, M, H D], values [B, M, H E] of H heads, and what is added to their scores.

    The scores of as many samples and heads as fit into _MOST_SCORES are computed at a time, and once more on the way
    back, so that all of them are never in memory. added: the sizes of a mask before M; each is 1, or as of the scores.
    """

    def __init__(self, batch, heads, n, m, d, e, scale, added, threads):
        fits = [one for one in range(1, heads + 1) if heads % one == 0 and one * n * m <= _MOST_SCORES]
        h = max(fits, default=1)
        fits = [one for one in range(1, batch + 1) if batch % one == 0 and one * heads * n * m <= _MOST_SCORES]
        b = max(fits, default=1) if h == heads else 1
        self.scale, self.size, self.columns = scale, 4 * b * h * n * m, m

        def part(length, width, turned=False):
            sizes, steps = (length, width), (heads * width, 1)
            if turned:
                sizes, steps = sizes[::-1], steps[::-1]
            return (b, h, *sizes), (length * heads * width, width, *steps)

        self.query, self.key, self.value, self.result = part(n, d), part(m, d), part(m, e), part(n, e)
        self.key_turned, self.value_turned = part(m, d, True), part(m, e, True)
        self.scores = (b, h, n, m), (h * n * m, n * m, m, 1)
        self.scores_turned = (b, h, m, n), (h * n * m, n * m, 1, m)
        self.added, by_sample, by_head = None, 0, 0
        if added is not None:
            of_samples, of_heads, rows = added
            sizes = (b if of_samples > 1 else 1, h if of_heads > 1 else 1, rows, m)
            self.added = sizes, (of_heads * rows * m, rows * m, m, 1)
            by_sample, by_head = (of_samples > 1) * of_heads * rows * m, (of_heads > 1) * rows * m
        self.offsets = [
            [4 * (i * heads * length * width + j * width) for length, width in ((n, d), (m, d), (m, e), (n, e))]
            + [4 * (i * by_sample + j * by_head)]
            for i in range(0, batch, b)
            for j in range(0, heads, h)
        ]

    @cached_property
    def _forward(self):
        scores = layout(*self.scores)
        softmax = Operation("softmax_forward", (FORWARD, SOFTMAX, scores, scores, _LAST, NONE),
                            {"src": scores, "dst": scores})  # fmt: skip
        to_scores = products(self.query, self.key_turned, self.scores, self.scale, self.added)
        return to_scores, softmax, products(self.scores, self.value, self.result)

    @cached_property
    def _back(self):
        return (
            products(self.scores_turned, self.result, self.value),
            products(self.result, self.value_turned, self.scores, self.scale),
            products(self.scores, self.key, self.query),
            products(self.scores_turned, self.query, self.key),
        )

    def forward(self, query, key, value, added, result) -> None:
        """Of addresses."""
        to_scores, softmax, to_result = self._forward
        held = scratch("scores", self.size)
        for to_query, to_key, to_value, to_y, to_added in self.offsets:
            to_scores(query + to_query, key + to_key, held, *((added + to_added,) if added else ()))
            softmax(held, held)
            to_result(held, value + to_value, result + to_y)

    def back(self, query, key, value, added, dy, dquery, dkey, dvalue) -> None:
        """Of addresses."""
        to_scores, softmax, _ = self._forward
        to_dvalue, to_dheld, to_dquery, to_dkey = self._back
        held, dheld = scratch("scores", self.size), scratch("diff_scores", self.size)
        for to_query, to_key, to_value, to_y, to_added in self.offsets:
            to_scores(query + to_query, key + to_key, held, *((added + to_added,) if added else ()))
            softmax(held, held)
            to_dvalue(held, dy + to_y, dvalue + to_value)
            to_dheld(dy + to_y, value + to_value, dheld)
            kernel("softmax_back")(held, dheld, self.size // 4 // self.columns, self.columns)
            to_dquery(dheld, key + to_key, dquery + to_query)
            to_dkey(dheld, query + to_query, dkey + to_key)


_attention = lru_cache(_MOST_PLANS)(_AttentionPlan)


class _Attention(PyLayer):
    @staticmethod
    def forward(ctx, query, key, value, added, plan):
        ctx.learned = _learned(query, key, value)
        query, key, value = _whole(query), _whole(key), _whole(value)
        y = _new([query.shape[0], query.shape[1], value.shape[2]])
        with LOCK:
            plan.forward(*_addresses(query, key, value, added, y))
        ctx.save_for_backward(query, key, value, added)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx, dy):
        query, key, value, added = ctx.saved_tensor()
        gradients, dy = [_new(one.shape) for one in (query, key, value)], _whole(dy)
        with LOCK:
            ctx.plan.back(*_addresses(query, key, value, added, dy, *gradients))
        return *_gradients(ctx.learned, *gradients), *(() if added is None else (None,))


def attention(query, key, value, heads: int, scale: float, added=None):
    """softmax(scale Q Kᵀ + added) V of each head: [B, N, H D], [B, M, H D], [B, M, H E] to [B, N, H E].

    added: [B or 1, H or 1, N or 1, M], of which there is no gradient.
    """
    (samples, n, width), (_, m, _) = query.shape, key.shape
    _require(key.shape == [samples, m, width] and value.shape[:2] == [samples, m], query.shape, key.shape, value.shape)
    if added is not None:
        full = samples, heads, n
        _require(all(one in (1, size) for one, size in zip(added.shape, full, strict=False)), added.shape, full)
        _require(added.ndim == 4 and added.shape[3] == m, added.shape, key.shape)
        added = _whole(added.astype(query.dtype))
    sizes = samples, heads, n, m, width // heads, value.shape[2] // heads
    plan = _attention(*sizes, float(scale), None if added is None else tuple(added.shape[:3]), num_threads())
    return _Attention.apply(query, key, value, added, plan)


class _Norm(PyLayer):
    """By the kernel of this name; weight, bias and shift are as long as the kernel takes them."""

    @staticmethod
    def forward(ctx, x, weight, bias, shift, name, sizes, rows, epsilon, *silu):
        ctx.learned = _learned(x, weight, bias, shift)
        x, y = _whole(x), _new(x.shape)
        shift = None if shift is None else _whole(shift)
        ctx.name, ctx.settings = name, (*sizes, *silu)
        statistics = _new([2, rows])
        kernel(name)(*_addresses(x, y, weight, bias, shift), *_halves(statistics), *sizes, epsilon, *silu)
        ctx.save_for_backward(x, weight, bias, shift, statistics)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, shift, statistics = ctx.saved_tensor()
        dx, *further = (None if one is None else _new(one.shape) for one in (x, weight, bias, shift))
        dy = _whole(dy)
        given = _addresses(x, dy, dx, weight, bias, shift)
        kernel(f"{ctx.name}_back")(*given, *_halves(statistics), *_addresses(*further), *ctx.settings)
        return _gradients(ctx.learned, *(dx, *further)[: len(ctx.learned)])


def group_norm(x, weight, bias, groups: int, epsilon: float, silu: bool = False, shift=None):
    """Of x [B, C, ...], or of x + shift [B, C] at every place; SiLU of it where asked for."""
    _require(weight.shape == bias.shape == x.shape[1:2], x.shape, weight.shape)
    if shift is not None:
        _require(shift.shape == x.shape[:2], x.shape, shift.shape)
    samples, channels = x.shape[:2]
    sizes = samples, groups, channels // groups, prod(x.shape[2:])
    return _Norm.apply(x, weight, bias, shift, "group_norm", sizes, samples * groups, epsilon, float(silu))


def _halves(pair) -> tuple[int, int]:
    """The addresses of the two halves of a tensor."""
    return pair.data_ptr(), pair.data_ptr() + 2 * prod(pair.shape)


def layer_norm(x, weight, bias, epsilon: float):
    """Over the last axis; weight and bias are both tensors or both None."""
    if weight is None:
        weight, bias = paddle.ones(x.shape[-1:], x.dtype), paddle.zeros(x.shape[-1:], x.dtype)
    _require(weight.shape == bias.shape == x.shape[-1:], x.shape, weight.shape)
    return _row_norm(x, weight, bias, epsilon, 1.0)


def rms_norm(x, weight, epsilon: float):
    """Over the last axis: `layer_norm` without a mean and a bias."""
    return _row_norm(x, weight, paddle.zeros_like(weight).detach(), epsilon, 0.0)


def _row_norm(x, weight, bias, epsilon: float, centred: float):
    rows = prod(x.shape[:-1])
    return _Norm.apply(x, weight, bias, None, "layer_norm", (rows, x.shape[-1]), rows, epsilon, centred)


class _Activation(PyLayer):
    @staticmethod
    def forward(ctx, x, name, shape, *sizes):
        x, y = _whole(x), _new(shape)
        ctx.name, ctx.sizes = name, sizes
        kernel(name)(*_addresses(x, y), *sizes)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        dx, dy = _new(x.shape), _whole(dy)
        kernel(f"{ctx.name}_back")(*_addresses(x, dy, dx), *ctx.sizes)
        return _gradients((True,), dx)


def geglu(x):
    """The first half of the last axis times GELU of the second."""
    *rows, width = x.shape
    return _Activation.apply(x, "geglu", [*rows, width // 2], prod(rows), width // 2)


def gelu(x):
    """x Φ(x)."""
    return _Activation.apply(x, "gelu", x.shape, prod(x.shape))


def silu(x):
    """x σ(x)."""
    return _Activation.apply(x, "silu", x.shape, prod(x.shape))


def squared_norms(tensors) -> list:
    """The sum of squares of each float32 tensor, float32 []."""
    found = _new([len(tensors)])
    _of_all("squared_norms", (found.data_ptr(),), [_whole(one) for one in tensors])
    return found.unbind() if tensors else []


def update_by_adamw(parameters, gradients, first, second, rate, betas, powers, epsilon, decay) -> None:
    """AdamW of float32 tensors, and of their moments, in place (Loshchilov and Hutter 2019, arXiv:1711.05101).

    powers: of the betas, to the number of this update."""
    (beta1, beta2), (power1, power2) = betas, powers
    rooted = (1.0 - power2) ** 0.5
    betas = beta1, 1.0 - beta1, beta2, 1.0 - beta2
    settings = rate * rooted / (1.0 - power1), 1.0 - rate * decay, *betas, epsilon * rooted
    _of_all("adamw", settings, parameters, [_whole(one) for one in gradients], first, second)


def average(averages, values, share: float) -> None:
    """averages += share (values - averages), of float32 tensors."""
    _of_all("average", (share,), averages, values)


def _of_all(name: str, settings, *columns) -> None:
    """A kernel's pass over rows of tensors that are of one size and have all their elements side by side."""
    rows = [number for row in zip(*columns, strict=True) for number in (*(one.data_ptr() for one in row), row[0].size)]
    kernel(name)(*settings, len(columns[0]), *rows)
