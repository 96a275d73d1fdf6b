"""What computes the networks that draw: Paddle as it is, or on a CPU OpenVINO, by choice (`--engine`).

    eager              Paddle, operation by operation
    openvino           the same in float32; differs by rounding. An autoencoder's encoder takes 5 % less time than eager
    openvino-bfloat16  in half precision, where the CPU has it: faster still, and another rounding of every layer

Networks are compiled at their first call for a shape; each keeps the two shapes that were used last. Weights that
change later do not reach them. In half precision (`--dtype`) on other devices the networks that are drawn with keep
their weights in it, as with O2 in training, and the autoencoder stays in float32.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Annotated

from ..config.data import EAGER
from ..utils import variables
from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.machine.devices import Device, current_kind
from ..utils.machine.resources import count_usable_cores
from ..utils.processes.signals import same_signal_stack

_PRECISIONS = {"openvino": "f32", "openvino-bfloat16": "bf16"}
ENGINES = (EAGER, *_PRECISIONS)
EXACT_ENGINES = (EAGER, "openvino")  # within 1e-4 of each other
Engine = Annotated[str, {"choices": list(ENGINES)}, "what computes the networks, on a CPU; eager by default"]
FLOAT32 = "float32"
DTYPES = (FLOAT32, "float16", "bfloat16")
Dtype = Annotated[
    str, {"choices": list(DTYPES)}, "what networks are computed in, where the device has it; float32 by default"
]
_KEPT_SHAPES = 2
_HALVES = ("encoder", "decoder")


def check_engine(engine: str) -> None:
    """Raises ConfigError for an engine that is not known or not here, or not for this device."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine} is not one of {', '.join(ENGINES)}")
    if engine == EAGER:
        return
    try:
        import openvino  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--engine {engine} needs OpenVINO ({error}); pip install openvino==2026.4.1, or omit it"
        ) from error
    if not current_kind().is_cpu:
        raise ConfigError(f"--engine {engine} is for CPUs, and this is {current_kind().words}; omit it")


def use_engine(layers: Iterable, engine: str) -> None:
    """Let `engine` compute these for as long as they live. Raises ConfigError."""
    check_engine(engine)
    if engine == EAGER:
        return
    for layer in layers:
        layer.forward = Compiled(layer.forward, _PRECISIONS[engine])


def check_dtype(dtype: str, device: Device) -> None:
    """Raises ConfigError for one that is not known, or that the device has not."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if dtype == FLOAT32 or getattr(device, dtype):
        return
    other = next((one for one in DTYPES[1:] if getattr(device, one)), None)
    fix = "use --engine openvino-bfloat16" if device.kind.is_cpu else f"use {other}" if other else "omit it"
    raise ConfigError(f"--dtype {dtype}: Paddle does not compute in it on {device.kind.words} ({device.name}); {fix}")


def use_dtype(model, dtype: str) -> type[AbstractContextManager] | partial:
    """Cast `model` for drawing, in place, in a type that `check_dtype` has passed; makes the context to draw in."""
    if dtype == FLOAT32:
        return nullcontext
    import paddle

    layers = [one.layer for one in model.networks.values() if not one.stays_float32]
    paddle.amp.decorate(models=layers, level="O2", dtype=dtype)
    return partial(paddle.amp.auto_cast, level="O2", dtype=dtype)


def drawing_layers(model) -> list:
    """What an engine computes of a model that draws: the denoiser, and the halves of its autoencoder."""
    halves = [getattr(getattr(model, "vae", None), name, None) for name in _HALVES]
    return [model.denoiser, *filter(None, halves)]


class Compiled:
    """A network's forward, compiled for the shapes and types of each call, which must be of tensors and of what stays
    the same. Gives a tensor, or, where the network gives an object with `sample`, one with only that."""

    def __init__(self, forward, precision: str):
        self._forward, self._precision = forward, precision
        self._requests: OrderedDict = OrderedDict()

    def __call__(self, *args, **kwargs):
        import paddle

        leaves = paddle.utils.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if paddle.is_tensor(leaf) and leaf.size]
        # Of a tensor without values, as of one that stays, nothing enters but that it is there.
        key = tuple(
            ("tensor", *leaf.shape, str(leaf.dtype)) if paddle.is_tensor(leaf) else repr(leaf) for leaf in leaves
        )
        if key not in self._requests:
            self._requests[key] = self._compile(args, kwargs, leaves, tensors)
        self._requests.move_to_end(key)
        while len(self._requests) > _KEPT_SHAPES:
            self._requests.popitem(last=False)
        request, wraps = self._requests[key]
        found = paddle.to_tensor(request.infer([tensor.numpy() for tensor in tensors])[0])
        return SimpleNamespace(sample=found) if wraps else found

    def _compile(self, args, kwargs, leaves, tensors):
        import openvino as ov
        import paddle

        from .openvino_graph import to_openvino

        wraps = []

        def call(*inputs):
            given = iter(inputs)
            own = [next(given) if paddle.is_tensor(leaf) and leaf.size else leaf for leaf in leaves]
            own_args, own_kwargs = paddle.utils.pack_sequence_as((args, kwargs), own)
            result = self._forward(*own_args, **own_kwargs)
            wraps.append(hasattr(result, "sample"))
            return result.sample if wraps[-1] else result

        get_logger().info("--engine: compiling for %s, once for this shape", [list(one.shape) for one in tensors])
        started = time.perf_counter()
        settings = {
            "INFERENCE_PRECISION_HINT": self._precision,
            "INFERENCE_NUM_THREADS": int(variables.read("OMP_NUM_THREADS", str(count_usable_cores()))),
            "PERFORMANCE_HINT": "LATENCY",
        }
        with same_signal_stack():
            compiled = ov.Core().compile_model(to_openvino(call, tensors), "CPU", settings)
            request = compiled.create_infer_request()
        get_logger().info("--engine: compiled in %.1f s", time.perf_counter() - started)
        return request, wraps[-1]
