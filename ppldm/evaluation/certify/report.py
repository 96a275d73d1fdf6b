"""What `ppldm certify` finds, as one object.

Small networks of every kind run once on the CPU; each of their layers, by class, shape of input and settings, is kept
with what it was given. These, some functions, and the networks themselves are computed on the device and on the CPU,
forward and backward, from the same weights, inputs and cotangent. A difference is relative to the largest value of the
CPU's output, or of any gradient. Then `ppldm train` trains a small model, and again from the checkpoint in the middle:
are losses and weights the same to the bit?
"""

import copy
import datetime
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from ... import __version__
from ...demo.shapes_world.write import World, make_shapes_world
from ...networks.build import build_network, save_component
from ...networks.configs import read_new_config
from ...networks.transformers.transform import transform
from ...training.metrics import read_metrics
from ...utils.errors import TrainingError
from ...utils.log import get_logger, progress
from ...utils.machine import devices
from ...utils.machine import resources as machine
from ...utils.machine.devices import CPU, device_name
from ...utils.machine.environment import installed_versions
from ...utils.stages import as_flags
from ...weights.folders import checkpoint_name

STEPS, MIDDLE = 4, 2
ROWS = 24
SEED = 0
# Of float32: sums of some thousand products in another order. Measured beside it, an error in a kernel is far larger.
BAR = 1e-3

REPEATS = 5
SIDE = 1024  # of the matrices
PICTURES = (8, 64, 64, 64)  # of the convolution: batch, channels, height, width


def try_resume(device: str) -> dict:
    """Losses of the last updates without and with a stop; do they and the weights agree? Raises TrainingError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shapes_world(folder / "data", World(32, seed=1), ROWS)
        vae = build_network("vae", read_new_config("vae", "vae_tiny", "--certify"), 0)
        save_component(vae, folder / "vae")
        flags = as_flags(
            device=device, vae_name_or_path=folder / "vae", text_encoder_config_file="ldmbert_tiny",
            unet_config_file="unet_tiny", tokenizer_name=folder / "data/tokenizer", model_max_length=12,
            file_list=folder / "data/demo.filelist.list", resolution=32, max_steps=STEPS, save_steps=MIDDLE,
            logging_steps=1, train_batch_size=2, gradient_accumulation_steps=1, num_workers=0, image_logging_steps=0,
            report_to="none", seed=3,
        )  # fmt: skip
        _train(flags, folder / "whole")
        shutil.copytree(folder / "whole" / checkpoint_name(MIDDLE), folder / "again" / checkpoint_name(MIDDLE))
        _train(flags, folder / "again")
        metrics = [read_metrics(folder / run / "metrics.jsonl") for run in ("whole", "again")]
        losses = [[record["loss"] for record in own if record["global_step"] > MIDDLE] for own in metrics]
        paths = [folder / run / checkpoint_name(STEPS) / "model_state.pdparams" for run in ("whole", "again")]
        states = [paddle.load(str(path), return_numpy=True).items() for path in paths]
        weights = [{name: value for name, value in one if isinstance(value, np.ndarray)} for one in states]
    equal = losses[0] == losses[1] and len(losses[0]) == STEPS - MIDDLE and weights[0].keys() == weights[1].keys()
    different = [name for name in weights[0] if equal and not np.array_equal(weights[0][name], weights[1][name])]
    return {"losses": losses[0], "resumed": losses[1], "different_weights": different, "equal": equal and not different}


def _train(flags: tuple[str, ...], output: Path) -> None:
    command = [sys.executable, "-m", "ppldm", "train", *flags, "--output_dir", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"the short training failed: {done.stderr.strip().splitlines()[-1]}")


@dataclass(frozen=True)
class Operation:
    """Something to compute. network: where it was found; what: in words; layer: with its weights, None without any;
    run(layer, *tensors): gives a tensor; inputs: arrays; those of floats get gradients."""

    network: str
    what: str
    layer: nn.Layer | None
    run: Callable
    inputs: tuple[np.ndarray, ...]


def list_networks() -> list[Operation]:
    """Small networks of every kind, each with inputs of its own."""
    rng = np.random.default_rng(SEED)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    def encode_text(net, one):
        return net(one)[0]

    def reconstruct(net, one):
        return net.decode(net.encode(one).latent_dist.mode()).sample

    ids, times = rng.integers(0, 128, (2, 12)), np.array([10, 700])
    words, latents, half = normal(2, 12, 128), normal(2, 4, 8, 8), np.array([0.1, 0.7], np.float32)
    known: dict[str, tuple] = {  # by the name of a config: kind of network, what is run of it, inputs
        "clip_tiny": ("text_encoder", encode_text, (ids,)),
        "ldmbert_tiny": ("text_encoder", encode_text, (ids,)),
        "uvit_tiny": ("transformer", transform, (latents, times, words)),
        "dit_tiny": ("transformer", transform, (latents, times, words)),
        "unet_tiny": ("unet", lambda net, *given: net(*given).sample, (normal(2, 8, 8, 8), times, words)),
        "vae_tiny": ("vae", reconstruct, (normal(2, 3, 32, 32),)),
        "cascade_c_tiny": ("cascade_prior", nn.Layer.__call__, (normal(2, 16, 4, 4), half, normal(2, 1, 128))),
    }
    found = []
    for name, (kind, run, inputs) in known.items():
        layer = build_network(kind, read_new_config(kind, name, "--certify"), SEED).eval()
        found.append(Operation(name.partition("_")[0], "the network", layer, run, inputs))
    return found


def list_layers(network: Operation) -> Iterator[Operation]:
    """The layers without layers that a network has run, each kind, setting and shape once."""
    seen, hooks = {}, []

    def keep(layer, given, _output):
        tensors = [one for one in given if isinstance(one, paddle.Tensor)]
        rest = given[len(tensors) :]  # such as a scale, behind them
        what = f"{type(layer).__name__}({layer.extra_repr()}) of {[list(one.shape) for one in tensors]}"
        seen.setdefault(what, (layer, tuple(one.numpy() for one in tensors), rest))

    for layer in network.layer.sublayers():
        if not layer.sublayers():
            hooks.append(layer.register_forward_post_hook(keep))
    with paddle.no_grad():
        network.run(network.layer, *map(paddle.to_tensor, network.inputs))
    for hook in hooks:
        hook.remove()
    for what, (layer, inputs, rest) in seen.items():
        yield Operation(network.network, what, layer, lambda net, *given, rest=rest: net(*given, *rest), inputs)


def list_functions() -> list[Operation]:
    """What networks and losses use besides layers."""
    rng = np.random.default_rng(SEED + 1)
    picture = rng.standard_normal((2, 8, 6, 6), dtype=np.float32)
    tokens, queries, keys = (rng.standard_normal((2, 4, 9, 16), dtype=np.float32) for _ in range(3))
    places = rng.integers(0, 9, (2, 4, 5, 16))
    functions = {
        "attention": (lambda q, k, v: F.softmax(q @ k.transpose([0, 1, 3, 2]) / 4.0) @ v, (queries, keys, tokens)),
        "nearest": (partial(F.interpolate, scale_factor=2.0, mode="nearest"), (picture,)),
        "bilinear": (partial(F.interpolate, size=[9, 9], mode="bilinear"), (picture,)),
        "pad on two sides": (partial(F.pad, pad=[0, 1, 0, 1]), (picture,)),
        "concat": (lambda a, b: paddle.concat([a, b], 1), (queries, keys)),
        "take along an axis": (lambda a: paddle.take_along_axis(a, paddle.to_tensor(places), 2), (tokens,)),
        "gelu": (F.gelu, (picture,)),
        "silu": (F.silu, (picture,)),
        "sine and cosine": (lambda a: paddle.sin(a) + paddle.cos(a).exp(), (picture,)),
        "mean squared error": (lambda a, b: ((a - b) ** 2).mean([1, 2, 3]), (queries, keys)),
        "standard deviation": (lambda a: a.std([2, 3]), (picture,)),
    }
    return [Operation("functions", what, None, lambda _net, *given, run=run: run(*given), inputs)
            for what, (run, inputs) in functions.items()]  # fmt: skip


def compute(operation: Operation, device: str, half: str | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
    """(output, gradients of inputs and weights), float32, on a device of Paddle's. half: the type of autocast."""
    before = device_name()
    paddle.set_device(device)
    try:
        layer = copy.deepcopy(operation.layer)
        if layer is not None:
            layer.to(device=device)
        given = [paddle.to_tensor(one) for one in operation.inputs]
        trained = [one for one in given if one.dtype == paddle.float32]
        for one in trained:
            one.stop_gradient = False
        with paddle.amp.auto_cast(enable=half is not None, dtype=half or "float16", level="O1"):
            output = operation.run(layer, *given)
        output = output.astype("float32")
        cotangent = np.random.default_rng(SEED + 2).standard_normal(output.shape, dtype=np.float32)
        weights = layer.parameters() if layer is not None else []
        if not output.stop_gradient:
            (output * paddle.to_tensor(cotangent)).sum().backward()
        return output.numpy(), [one.grad.numpy() for one in [*trained, *weights] if one.grad is not None]
    finally:
        paddle.set_device(before)


def difference(of: list[np.ndarray], beside: list[np.ndarray]) -> float:
    """The largest difference by the largest value of that array of `beside`; infinity if not finite, or not there."""
    if len(of) != len(beside):
        return float("inf")
    pairs = zip(of, beside, strict=True)
    gaps = [np.abs(one - other).max(initial=0) / max(np.abs(other).max(initial=0), 1e-30) for one, other in pairs]
    return max((float(gap) if np.isfinite(gap) else float("inf") for gap in gaps), default=0.0)


def attempt(function: Callable, *given) -> tuple:
    """(what a function gives, ""); (None, the first line of an error of Paddle's) where a kernel is not there."""
    try:
        return function(*given), ""
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return None, next(iter(str(error).strip().splitlines()), type(error).__name__)


def compare(operation: Operation, device: str) -> dict:
    """How far a device is from the CPU, JSON-ready; `error` where it cannot compute it at all."""
    named = {"network": operation.network, "what": operation.what}
    expected, gradients = compute(operation, CPU.paddle)
    found, error = attempt(compute, operation, device)
    if error:
        return named | {"error": error, "ok": False}
    forward, backward = difference([found[0]], [expected]), difference(found[1], gradients)
    return named | {"forward": forward, "gradient": backward, "ok": max(forward, backward) <= BAR}


def drift(operation: Operation, device: str, half: str) -> dict:
    """How far half precision is from float32 on the same device: root mean squares of the difference over those of the
    values, of the output and over all gradients."""
    single = compute(operation, device)
    halved, error = attempt(compute, operation, device, half)
    if error:  # a device may say that it has the type, and lack kernels for it
        return {"network": operation.network, "error": error}

    def relative(of: list[np.ndarray], beside: list[np.ndarray]) -> float:
        values, exact = (np.concatenate([one.ravel() for one in some]).astype(np.float64) for some in (of, beside))
        return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))

    return {"network": operation.network, "forward": relative([halved[0]], [single[0]]),
            "gradient": relative(halved[1], single[1])}  # fmt: skip


def make_report(device: str, resume: bool) -> dict:
    """The whole report. Raises ConfigError for a device that is not here, PpldmError where a training fails."""
    devices.use_device(device)
    devices.set_exactness(fewer_bits=False, search_kernels=False)
    found = devices.current_device()
    networks = list_networks()
    compared = [*list_functions(), *(layer for network in networks for layer in list_layers(network)), *networks]
    operations = [compare(one, found.name) for one in progress(compared, desc="operations", unit="operation")]
    halves = {"bfloat16": found.bfloat16, "float16": found.float16}
    drifts = {half: [drift(one, found.name, half) for one in list_networks()] if has else None
              for half, has in halves.items()}  # fmt: skip
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": asdict(found) | {"kind": found.kind.name},
        "machine": {"system": platform.platform(), "cores": machine.count_usable_cores(),
                    "processor": machine.read_cpu("model name"), "memory_bytes": machine.usable_memory_bytes()},
        "versions": {"ppldm": __version__, "python": platform.python_version(), **installed_versions()},
        "bar": BAR,
        "operations": operations,
        "half_precision": drifts,
        "peak_device_memory_bytes": devices.peak_device_memory_bytes(),
        "speed": {half: measure_speed(half) for half in ("float32", *halves) if halves.get(half, True)},
        "resume": try_resume(device) if resume else None,
    }  # fmt: skip
    passed = all(one["ok"] for one in operations) and (not resume or report["resume"]["equal"])
    return report | {"passed": passed}


def measure_speed(half: str) -> dict:
    """GFLOP a second, forward and backward, of a matrix product and a convolution; None for what cannot be computed."""
    matrices = [paddle.randn([SIDE, SIDE]) for _ in range(2)]
    batch, channels, height, width = PICTURES
    convolution, pictures = paddle.nn.Conv2D(channels, channels, 3, padding=1), paddle.randn(PICTURES)
    works = {
        "matmul": (lambda: paddle.matmul(*matrices), 2 * SIDE**3),
        "conv2d": (lambda: convolution(pictures), 2 * 9 * channels**2 * batch * height * width),
    }
    for one in (*matrices, pictures):
        one.stop_gradient = False
    found = {}
    for name, (work, operations) in works.items():
        seconds, error = attempt(lambda work=work: sorted(_time(work, half) for _ in range(REPEATS + 1)))
        found[name] = None if error else 3 * operations / seconds[REPEATS // 2] / 1e9
        if error:
            get_logger().warning("%s in %s: %s", name, half, error)
    return found


def _time(work: Callable, half: str) -> float:
    """Seconds of once forward and backward."""
    devices.wait_for_device()
    began = time.perf_counter()
    with paddle.amp.auto_cast(enable=half != "float32", dtype="float16" if half == "float32" else half):
        work().astype("float32").sum().backward()
    devices.wait_for_device()
    return time.perf_counter() - began


def describe(report: dict) -> str:
    device, operations = report["device"], report["operations"]
    lines = [f"{device['name']}: {device['model']}", ""]
    for network in dict.fromkeys(one["network"] for one in operations):
        of = [one for one in operations if one["network"] == network]
        worst = [max(one.get(name, float("inf")) for one in of) for name in ("forward", "gradient")]
        lines.append(f"  {network:<10} {len(of):>3} operations  forward {worst[0]:.1e}  gradient {worst[1]:.1e}")
    lines += [f"  not the same: {one['network']}, {one['what']}: {one.get('error') or one}" for one in operations
              if not one["ok"]]  # fmt: skip
    for half, found in report["half_precision"].items():
        worst = max((one.get("gradient", float("inf")) for one in found or ()), default=0)
        lines.append(f"  {half:<10} " + (f"gradients off by {worst:.1e} (root mean square)" if found else "not here"))
        lines += [f"  {half:<10} {one['network']}: {one['error']}" for one in found or () if "error" in one]
    for kind, speeds in report["speed"].items():
        lines.append(f"  {kind:<10} " + ", ".join(f"{name} {speed or 0:.0f} GFLOP/s" for name, speed in speeds.items()))
    if report["resume"]:
        lines.append(f"  resumed    {'equal to the bit' if report['resume']['equal'] else 'NOT equal'}")
    return "\n".join([*lines, "", "certified" if report["passed"] else "NOT certified"])
