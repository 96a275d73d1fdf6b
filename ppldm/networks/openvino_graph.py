"""A network's call, with the operations that Paddle meets in it, as a model of OpenVINO.

Paddle runs the call once on symbols of the given shapes (`training/compiled.py`) and keeps a list of operations. Each
is written down again with OpenVINO's (https://docs.openvino.ai/, "Available Operation Sets", opset13). For one that no
network here draws with there is an error that names it. All shapes are known.
"""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import paddle
from paddle.static import InputSpec

from ..utils.errors import ConfigError


def trace(function: Callable, tensors: Sequence[paddle.Tensor]):
    """(operations, parameters by name) of `function(*tensors)`, which gives a tensor or several."""

    def call(*inputs):
        return function(*inputs)

    names = [f"x{number}" for number in range(len(tensors))]  # Paddle asks for names of arguments
    asked = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    call.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
    spec = [InputSpec.from_tensor(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
    static = paddle.jit.to_static(paddle.jit.not_to_static(call), input_spec=spec, full_graph=True, backend=None)
    # A decoder inside autocast, be it turned off, looks for values that are not finite, which symbols do not have.
    no_autocast = mock.patch.object(sys.modules["paddle.amp.auto_cast"], "_g_amp_state_", None)
    with no_autocast, paddle.no_grad(), warnings.catch_warnings():
        # The model's code asks symbols for what only tensors know, and does without.
        warnings.filterwarnings("ignore", "Tensor do not have '\\w+' interface for pir graph mode")
        program = static.concrete_program
    tensors_by_name = {tensor.name: tensor for tensor in program.parameters[0]}
    return program, tensors_by_name


def to_openvino(function: Callable, tensors: Sequence[paddle.Tensor]):
    """`function(*tensors)` as an openvino.Model of their shapes. Raises ConfigError for an unknown operation."""
    import openvino as ov

    program, parameters = trace(function, tensors)
    graph = _Graph(parameters)
    for operation in program.main_program.global_block().ops:
        graph.add(operation)
    outputs = [graph.values[value.id] for value in program.outputs]
    ordered = [graph.inputs[f"x{number}"] for number in range(len(tensors))]
    return ov.Model(outputs, ordered, "network")


class _Graph:
    """Paddle's operations so far, as OpenVINO's.

    values: by the ids of Paddle's values. What depends only on shapes is numpy's; a list is a list. A method has the
    name of the operation that it makes, of its attributes, results and values.
    """

    def __init__(self, parameters: dict[str, paddle.Tensor]):
        import openvino.opset13 as opset

        self.opset, self.parameters = opset, parameters
        self.values: dict[int, object] = {}
        self.inputs: dict[str, object] = {}

    def add(self, operation) -> None:
        kind = operation.name().partition(".")[2]
        inputs = [self.values[one.id] if one.initialized() else None for one in operation.operands_source()]
        attrs, results = operation.attrs(), operation.results()
        if make := getattr(self, f"_{kind}", None):
            made = make(attrs, results, *inputs)
        elif kind in _MADE:
            made = _MADE[kind](self.opset, attrs, *inputs)
        elif kind in _SAME:
            made = getattr(self.opset, _SAME[kind])(*inputs)
        elif kind == "shadow_output":
            return
        else:
            raise ConfigError(f"the engine openvino does not know the operation {kind} of this network; omit --engine")
        made = made if isinstance(made, tuple) else (made,)
        for result, one in zip(results, made, strict=False):  # statistics of norms, which nobody asks for
            self.values[result.id] = one

    def _parameter(self, attrs, results):
        return self.opset.constant(self.parameters[attrs["parameter_name"]].numpy())

    def _data(self, attrs, results):
        made = self.opset.parameter(list(attrs["shape"]), np.dtype(_dtype(results[0])), name=attrs["name"])
        self.inputs[attrs["name"]] = made
        return made

    def _full_int_array(self, attrs, results):
        return np.array(attrs["value"], _dtype(results[0]))

    def _full(self, attrs, results):
        return np.full(list(attrs["shape"]), attrs["value"], _dtype(results[0]))

    def _arange(self, attrs, results, start, stop, step):
        return np.arange(*(_known(one).item() for one in (start, stop, step))).astype(_dtype(results[0]))

    def _cast(self, attrs, results, value):
        dtype = np.dtype(_dtype(results[0]))
        return value.astype(dtype) if isinstance(value, np.ndarray) else self.opset.convert(value, dtype)

    def _scale(self, attrs, results, value, factor):
        """value factor + bias, or (value + bias) factor."""
        dtype = _dtype(results[0])
        factor, bias = _known(factor).reshape([]).astype(dtype), np.array(attrs["bias"], dtype)
        if isinstance(value, np.ndarray):
            return (value * factor + bias if attrs["bias_after_scale"] else (value + bias) * factor).astype(dtype)
        if attrs["bias_after_scale"]:
            return self.opset.add(self.opset.multiply(value, factor), bias)
        return self.opset.multiply(self.opset.add(value, bias), factor)

    def _flatten(self, attrs, results, value):
        sizes = _sizes(value)
        first, last = attrs["start_axis"] % len(sizes), attrs["stop_axis"] % len(sizes)
        sizes[first : last + 1] = [math.prod(sizes[first : last + 1])]
        return self.opset.reshape(value, np.array(sizes, np.int64), special_zero=False)

    def _expand(self, attrs, results, value, sizes):
        own, wanted = _sizes(value), _known(sizes).tolist()
        own = [1] * (len(wanted) - len(own)) + own
        wanted = [old if new == -1 else new for old, new in zip(own, wanted, strict=True)]
        return self.opset.broadcast(value, np.array(wanted, np.int64))

    def _stack(self, attrs, results, values):
        axis = attrs["axis"]
        if all(isinstance(one, (np.ndarray, np.generic)) for one in values):
            return np.stack(values, axis)
        return self.opset.concat([self.opset.unsqueeze(one, np.array(axis)) for one in values], axis)

    def _slice(self, attrs, results, value, starts, ends):
        axes, starts, ends = attrs["axes"], _known(starts), _known(ends)
        lost = attrs["decrease_axis"]
        if isinstance(value, np.ndarray):
            cuts = [slice(None)] * value.ndim
            for axis, start, end in zip(axes, starts.tolist(), ends.tolist(), strict=True):
                cuts[axis] = slice(start, end)
            cut = value[tuple(cuts)]
            return cut.squeeze(tuple(lost)) if lost else cut
        cut = self.opset.slice(value, starts, ends, np.ones(len(axes), np.int64), np.array(axes))
        return self.opset.squeeze(cut, np.array(lost)) if lost else cut

    def _conv2d(self, attrs, results, value, weight):
        pads, groups = attrs["paddings"], attrs["groups"]
        before, after = (pads, pads) if len(pads) == 2 else (pads[::2], pads[1::2])
        if attrs["padding_algorithm"] != "EXPLICIT" or attrs["data_format"] != "NCHW":
            raise ConfigError("the engine openvino knows convolutions of NCHW with given padding; omit --engine")
        if groups == 1:
            return self.opset.convolution(value, weight, attrs["strides"], before, after, attrs["dilations"])
        out, *rest = weight.output(0).shape
        weight = self.opset.reshape(weight, np.array([groups, out // groups, *rest]), special_zero=False)
        return self.opset.group_convolution(value, weight, attrs["strides"], before, after, attrs["dilations"])

    def _layer_norm(self, attrs, results, value, weight, bias):
        rank, first = len(_sizes(value)), attrs["begin_norm_axis"]
        normal = self.opset.mvn(value, np.arange(first, rank), True, attrs["epsilon"], "INSIDE_SQRT")
        normal = normal if weight is None else self.opset.multiply(normal, weight)
        return normal if bias is None else self.opset.add(normal, bias)

    def _pad(self, attrs, results, value, sizes):
        """Sizes from the last axis to the first, before and after."""
        around = _known(sizes).reshape(-1, 2)[::-1]
        around = np.concatenate([np.zeros((len(_sizes(value)) - len(around), 2), np.int64), around])
        number = attrs.get("pad_value", attrs.get("value", 0.0))
        if attrs.get("mode", "constant") != "constant":
            raise ConfigError("the engine openvino pads with a number; omit --engine")
        return self.opset.pad(value, around[:, 0], around[:, 1], "constant", np.float32(number))

    def _nearest_interp(self, attrs, results, value, wanted, *_):
        """By a factor; or to the sizes of what a UNet has put aside, where latents do not halve evenly."""
        if wanted is None:
            sizes = [int(side * factor) for side, factor in zip(_sizes(value)[2:], attrs["scale"], strict=True)]
        else:
            sizes = _known(wanted).tolist()
        modes = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        return self.opset.interpolate(value, np.array(sizes), "nearest", "sizes", axes=np.array([2, 3]), **modes)

    _pad3d = _pad


# What others are, of their attributes and values.
_MADE: dict[str, Callable] = {
    "shape64": lambda opset, attrs, value: np.array(_sizes(value), np.int64),
    "reshape": lambda opset, attrs, value, sizes: opset.reshape(value, _known(sizes), special_zero=True),
    "unsqueeze": lambda opset, attrs, value, axes: opset.unsqueeze(value, _known(axes)),
    "squeeze": lambda opset, attrs, value, axes: opset.squeeze(value, _known(axes)),
    "transpose": lambda opset, attrs, value: opset.transpose(value, np.array(attrs["perm"])),
    "combine": lambda opset, attrs, *values: ([*values],),
    "split": lambda opset, attrs, values: tuple(values),
    "concat": lambda opset, attrs, values, axis: opset.concat(values, _known(axis).item()),
    "split_with_num": lambda opset, attrs, value, axis: (
        opset.split(value, _known(axis).reshape([]), attrs["num"]).outputs(),
    ),
    "matmul": lambda opset, attrs, *values: opset.matmul(*values, attrs["transpose_x"], attrs["transpose_y"]),
    "softmax": lambda opset, attrs, value: opset.softmax(value, attrs["axis"]),
    "gelu": lambda opset, attrs, value: opset.gelu(value, "TANH" if attrs["approximate"] else "ERF"),
    "group_norm": lambda opset, attrs, *values: opset.group_normalization(*values, attrs["groups"], attrs["epsilon"]),
}
# Operations of one or two values that have all they need in them.
_SAME = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide", "exp": "exp", "sin": "sin",
    "cos": "cos", "sqrt": "sqrt", "tanh": "tanh", "sigmoid": "sigmoid", "relu": "relu", "abs": "abs",
    "elementwise_pow": "power", "silu": "swish",
}  # fmt: skip


def _dtype(value) -> str:
    return str(value.dtype).rpartition(".")[2].lower()


def _sizes(value) -> list[int]:
    return list((value if hasattr(value, "get_node") else value.output(0)).shape)


def _known(value) -> np.ndarray:
    """A value that depends only on shapes. Raises ConfigError for another."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    raise ConfigError("the engine openvino needs sizes that no input decides; omit --engine")
