"""Drawing in half precision (`--dtype`), on a device that has it: the networks that are drawn with keep their weights
in it, as with O2 in training, and the autoencoder stays in float32. A CPU has it only by an engine."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated

from ..utils.errors import ConfigError
from ..utils.machine.devices import Device, current_device

FLOAT32 = "float32"
DTYPES = (FLOAT32, "float16", "bfloat16")
Dtype = Annotated[
    str, {"choices": list(DTYPES)}, "what networks are computed in, where the device has it; float32 by default"
]


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
    """Cast `model` for drawing, in place; makes the context to draw in. Raises ConfigError."""
    check_dtype(dtype, current_device())
    if dtype == FLOAT32:
        return nullcontext
    import paddle

    layers = [one.layer for one in model.networks.values() if not one.stays_float32]
    paddle.amp.decorate(models=layers, level="O2", dtype=dtype)
    return partial(paddle.amp.auto_cast, level="O2", dtype=dtype)
