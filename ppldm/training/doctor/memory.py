"""How much memory a run takes at its peak (docs/training.md has the formula, and what it was measured against).

states       weights, gradients, the optimizer's moments and masters, averages: `dry_run.reckon`
activations  of the trained networks what they keep, and the most that one of them needs beyond that; or of a
             frozen network what it needs, where that is more (`activations`)
batches      what loader processes have ready
process      on a device without a memory of its own: the program and its libraries
heap         there: what the C library keeps of what was given back
copy         there: of what a checkpoint holds, with --use_async_save
export       what is exported last, as it is written, where that is more than the activations, which are gone then
whole        the weights that other devices have, where all are gathered to draw: as far as the activations were less
reading      there: the weights that a model starts from, as they are read, where that is more than what comes later

What a network keeps is counted from its operations without computing any of them (`count_activations`). It is built and
called in Paddle's static mode: operations know the shapes of what they make, and weights take no memory.
`append_backward` adds the operations of the backward pass, which name the values that they need: the same that autograd
keeps. A value lives from the operation that makes it to the last one that needs it. What is a view (reshape, transpose,
slice, split) shares the memory of what it is made from. A block that is recomputed keeps nothing until the first of its
backward operations, and then all that it would have kept. The gradients of weights are left out: they are there all the
time.
"""

import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from unittest import mock

import numpy as np
import paddle
from ppdiffusers.models.attention_processor import AttnProcessor

from ...config.recipe import Recipe
from ...data.shapes import make_shapes
from ...families.base import get_family
from ...networks.configs import TEXT_ENCODERS, downscale_factor, hidden_width, is_sd3, pooled_width
from ...networks.transformers.transform import transform
from ...utils.errors import ModelError, describe
from ...utils.machine.devices import current_kind
from ...utils.machine.resources import process_memory_bytes
from ...weights.fill import bare_network
from ..commands.dry_run import ENDLESS, SPEED, count_averages, reckon

# Fitted to runs of the tiny networks (benchmarks/memory.py).
FIRST_UPDATE_BYTES = 120_000_000  # threads, kernels and their buffers, that an import does not bring
HEAP_SHARE = 0.3  # of activations, that glibc keeps without using it
LOADER_BYTES = 20_000_000  # that a loader process writes for itself: 15 MB were measured
_BATCHES_A_LOADER = 2
_VIEWS = {f"pd_op.{name}" for name in (
    "reshape", "transpose", "slice", "split_with_num", "split", "unsqueeze", "squeeze", "flatten", "share_data_",
    "reshape_grad", "transpose_grad", "unsqueeze_grad", "squeeze_grad", "flatten_grad",
)} | {"builtin.split"}  # fmt: skip
_NO_MEMORY = ("builtin.parameter", "pd_op.data", "pd_op.full_int_array", "builtin.combine")
_CONVOLUTIONS = ("pd_op.conv2d", "pd_op.conv2d_grad")
_data = paddle.static.data  # (name, shape, dtype: float32)


@dataclass(frozen=True)
class Shapes:
    """Of a batch: samples, picture and latents [channels, h, w], tokens of a caption and the width of their states;
    more: tokens of a third text encoder, 0 without one."""

    samples: int
    picture: tuple[int, int, int]
    latents: tuple[int, int, int]
    tokens: int
    width: int
    base: dict | None = None  # config of the UNet that a control network leads
    more: int = 0

    @classmethod
    def of(cls, configs: dict, samples: int, height: int, width: int, tokens: int, more: int = 0) -> "Shapes":
        """By the completed configs of a model's components, those of them that it has."""
        vae, text = configs.get("vae"), configs.get("text_encoder")
        factor = downscale_factor(vae) if vae else 8
        latents = (vae["latent_channels"] if vae else 4, height // factor, width // factor)
        base = configs.get("unet") if "controlnet" in configs else None
        return cls(samples, (3, height, width), latents, tokens, hidden_width(text) if text else 0, base, more)


@dataclass(frozen=True)
class Activations:
    """Bytes: `kept` from the forward for the backward pass; `peak` of all that is there at a time, `kept` included.
    operations: floating-point ones of the forward pass, in its convolutions and matrix products."""

    kept: int
    peak: int
    operations: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of a device by purpose; `unknown`: networks whose activations are not counted. operations: of a
    micro-batch, as far as they are counted: forward, backward and what is recomputed."""

    by_purpose: dict[str, int]
    unknown: tuple[str, ...] = ()
    batch_bytes: int = 0  # of a micro-batch as loaders make it
    on_disk: dict[str, int] = field(default_factory=dict)  # `dry_run.reckon`
    operations: int = 0

    @property
    def total(self) -> int:
        """Of all purposes."""
        return sum(self.by_purpose.values())


def estimate(recipe: Recipe, num_devices: int) -> Memory:
    """The peak of a device, or of the process where a device has no memory of its own. Raises PpldmError."""
    process = process_memory_bytes("VmRSS")
    family, arguments = get_family(recipe.family), recipe.training
    reckoned = reckon(recipe, num_devices)
    states, on_disk = reckoned["bytes_a_device"], reckoned["bytes_on_disk"]
    states["average"] += 0 if current_kind().own_memory else reckoned["bytes_offloaded"]
    networks = family.networks(recipe.model, recipe.data)
    configs = {family.components[name]: one.config for name, one in networks.items()}
    adapted = getattr(recipe.model, "lora_components", ()) if getattr(recipe.model, "lora_rank", None) else ()
    sides = make_shapes(recipe.data) or [(recipe.data.resolution, recipe.data.resolution)]
    height, width = max(sides, key=np.prod)
    tokens = getattr(recipe.model, "model_max_length", 0)
    more = recipe.model.text_encoder_3_max_length if "text_encoder_3" in configs else 0
    shapes = Shapes.of(configs, arguments.per_device_train_batch_size, height, width, tokens, more)
    led = ("unet",) if "controlnet" in configs else ()  # counted with what leads it
    texts = ("projected_text_encoder", *TEXT_ENCODERS)
    cached = {"vae": recipe.data.latents == "cached", **dict.fromkeys(texts, recipe.data.text_embeddings == "cached")}
    found, unknown, operations = [], [], 0
    for name, network in networks.items():
        kind, trained = family.components[name], network.trained or name in adapted
        if cached.get(kind) or name in led:
            continue
        counted = count_activations(kind, network.config, shapes, trained, arguments.recompute)
        if counted is None:
            unknown.append(name)
        else:
            found.append(counted)
            passes = 1 + trained * (1 + network.trained + arguments.recompute)  # gradients of values, of weights
            operations += counted.operations * passes
    kind = current_kind()
    activations = _peak(found)
    if (arguments.bf16 or arguments.fp16) and kind.mixed_precision:
        activations //= 2
    sample = 3 * height * width + 12 * int(np.prod(shapes.latents)) + 8 * tokens
    loaders = arguments.dataloader_num_workers
    parts, elsewhere = {**states, "activations": activations}, reckoned["bytes_elsewhere"]
    if elsewhere and kind.own_memory:
        parts["whole"] = max(0, elsewhere - activations)
    if not kind.own_memory:
        parts["batches"] = (_BATCHES_A_LOADER * max(loaders, 2) + 1) * shapes.samples * sample if loaders else 0
        parts["process"] = process + FIRST_UPDATE_BYTES
        parts["heap"] = int(HEAP_SHARE * activations)
        parts["copy"] = on_disk["checkpoint"] if arguments.use_async_save else 0
        trained = sum(one["trained"] for one in reckoned["components"].values())
        average = 4 * trained * count_averages(recipe, of_export=True)
        gathered = elsewhere + average - average // num_devices if elsewhere else 0
        exported = on_disk["exported"] + average + gathered - states["gradients"]  # which are let go before
        parts["export"] = max(0, exported - activations - parts["heap"])
        later = sum(states.values()) - states["weights"] + activations + parts["heap"] + parts["export"]
        parts["reading"] = max(0, elsewhere + _read_bytes(family, recipe, reckoned["components"]) - later)
    return Memory(parts, tuple(unknown), shapes.samples * sample, on_disk, operations)


def forecast(recipe: Recipe, num_devices: int) -> dict:
    """Of a device: the bytes of its activations, and the networks whose are not counted; floating-point operations of
    an update, and hours of all updates at `SPEED`, where there is an end to them. Raises ModelError."""
    memory, arguments = estimate(recipe, num_devices), recipe.training
    updates = -(-(arguments.max_samples or 0) // arguments.samples_of_update(num_devices)) or arguments.max_steps
    operations = memory.operations * arguments.accumulation_for(num_devices)
    report = {"bytes_of_activations": memory.by_purpose["activations"], "not_counted": list(memory.unknown)}
    report |= {"operations_an_update": operations, "updates": updates}
    return report | {"hours": operations * updates / SPEED / 3600 if 0 < updates < ENDLESS else None}


def _read_bytes(family, recipe: Recipe, components: dict) -> int:
    """Of the weights that a model starts from: all are there when its networks are made, before anything is trained."""
    places = family.places(recipe.model) if hasattr(family, "places") else {}
    return sum(4 * components[name]["parameters"] for name, place in places.items() if place and name in components)


def _peak(networks: list[Activations]) -> int:
    """Of networks that run one after the other, where what is kept stays until all have run."""
    return sum(one.kept for one in networks) + max((one.peak - one.kept for one in networks), default=0)


def loader_bytes(memory: Memory, num_loaders: int, anonymous: int) -> int:
    """What the loader processes of a device take at most, beside the batches that they share with the main process.
    They are forked and share its memory, `anonymous` bytes of the program and, on a CPU, weights and averages, until it
    writes to it: all together hold one more copy. For itself each has `LOADER_BYTES`, and a batch, twice at most."""
    if not num_loaders:
        return 0
    on_host = memory.by_purpose if "process" in memory.by_purpose else {}
    inherited = anonymous + sum(on_host.get(name, 0) for name in ("weights", "average"))
    return inherited + num_loaders * (LOADER_BYTES + 2 * memory.batch_bytes)


def count_activations(kind: str, config: dict, shapes: Shapes, trained: bool, recompute: bool) -> Activations | None:
    """Of a network of a completed config that is called once; None for a kind of network that is not known here.
    `trained`: gradients pass through it. Raises ModelError where the network cannot be traced."""
    if kind not in _CALLS:
        return None
    paddle.enable_static()
    program, blocks = paddle.static.Program(), []
    try:
        with paddle.static.program_guard(program, paddle.static.Program()), _traced(program, blocks):
            network = bare_network(kind, config)
            if recompute and trained and kind in _RECOMPUTED:
                network.train()
                _RECOMPUTED[kind](network)
            result = _CALLS[kind](network, shapes, *([trained] if kind == "vae" else []))
            forward = len(program.global_block().ops)
            if trained:
                paddle.static.append_backward(result.mean())
            parameters = {_sized(parameter)[0] for parameter in network.parameters()}
            return _live(program.global_block().ops, forward, parameters, blocks if trained else [])
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"the memory of a {kind} cannot be estimated ({describe(error)})") from error
    finally:
        paddle.disable_static()


@contextmanager
def _traced(program, blocks: list[tuple[int, int]]):
    """Inside, shapes are numbers, weights and buffers need no values, and blocks that are computed again are noted as
    spans of operations. No operation is told the lines and the layers that made it: a third of the time."""

    def noted(function):
        def call(*arguments, use_reentrant=None, **named):
            start = len(program.global_block().ops)
            result = function(*arguments, **named)
            blocks.append((start, len(program.global_block().ops)))
            return result

        return call

    recompute = mock.patch("paddle.distributed.auto_parallel.interface.recompute", noted)
    shape = mock.patch.object(paddle, "shape", lambda value: list(value.shape))
    keep = lambda layer, name, value, persistable=True: object.__setattr__(layer, name, value)  # noqa: E731
    buffer = mock.patch.object(paddle.nn.Layer, "register_buffer", keep)
    given = mock.patch.object(paddle.nn, "Parameter", lambda data: paddle.create_parameter(data.shape, data.dtype))
    stack = mock.patch.object(traceback, "extract_stack", lambda *_, **__: [])
    layers = mock.patch.object(paddle.nn.layer.layers, "name_struct", nullcontext)
    with recompute, shape, buffer, given, stack, layers, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class _Value:
    """Bytes that are taken, and the operations from which and until which they are needed."""

    num_bytes: int
    made: int
    uses: list[int] = field(default_factory=list)


def _live(ops: list, forward: int, parameters: set, blocks: list[tuple[int, int]]) -> Activations:
    """Of operations, the first `forward` of which are the forward pass; blocks: spans that are computed again."""
    changes, kept = [0] * (len(ops) + 1), 0
    values, workspaces = _values(ops, parameters)
    resumed = {}  # of a block, the first operation of the backward pass that needs what it made
    for span in blocks:
        uses = [use for one in values if span[0] <= one.made < span[1] for use in one.uses if use >= forward]
        resumed[span] = min(uses, default=forward)
    for value in values:
        stop = max(value.uses, default=value.made)
        block = next((span for span in blocks if span[0] <= value.made < span[1]), None)
        spans = [(value.made, stop)]
        if block and stop >= forward:
            within = max((use for use in value.uses if use < forward), default=value.made)
            if within < block[1]:  # nothing behind the block needs it, until it is computed again
                spans = [(value.made, within), (resumed[block], stop)]
        for first, last in spans:
            changes[first] += value.num_bytes
            changes[last + 1] -= value.num_bytes
            kept += value.num_bytes if first < forward <= last else 0
    at = accumulate(changes)
    peak = max(now + more for now, more in zip(at, workspaces, strict=False))
    return Activations(kept, peak, sum(map(_operations, ops[:forward])))


def _values(ops: list, parameters: set) -> tuple[list[_Value], list[int]]:
    """(what takes memory, the bytes that each operation takes while it runs)."""
    values, bases, members, strided, workspaces = {}, {}, {}, set(), []
    for number, op in enumerate(ops):
        given = [_sized(one) for one in op.operands_source() if one.initialized() and not op.is_no_need_buffer(one)]
        flat = [one for key, size in given for one in members.get(key, [(key, size)])]
        for key, _ in flat:
            if (base := bases.get(key, key)) in values:
                values[base].uses.append(number)
        made = [_sized(one) for one in op.results() if one.initialized()]
        if op.name() == "builtin.combine":
            members[made[0][0]] = flat
        is_view, copied = op.name() in _VIEWS and flat, 0
        for key, size in made:
            if is_view:
                bases[key] = bases.get(flat[0][0], flat[0][0])
                if "transpose" in op.name() or flat[0][0] in strided:
                    strided.add(key)
            elif size and op.name() not in _NO_MEMORY and key not in parameters:
                values[key] = _Value(size, number)
        if not is_view:
            copied = sum(size for key, size in flat if key in strided)
        workspaces.append(copied + (_columns(op) if op.name() in _CONVOLUTIONS else 0))
    return list(values.values()), workspaces


def _sized(value) -> tuple[str, int]:
    """(what tells a value from others, its bytes: none of a list of values)."""
    return value.id, prod(value.shape) * value.element_size() if value.is_dense_tensor_type() else 0


def _columns(op) -> int:
    """Bytes that a convolution of Paddle takes on a CPU beside its result: the patches of one sample as columns."""
    picture, weight, *_ = (one for one in op.operands_source() if one.initialized())
    result = op.results()[0] if op.name() == "pd_op.conv2d" else op.operands_source()[-1]
    sides = result.shape[2:]
    return 4 * prod(weight.shape[1:]) * prod(sides) if prod(weight.shape[2:]) > 1 else 0


def _operations(op) -> int:
    """Floating-point operations of a convolution or a matrix product; of anything else none are counted."""
    if op.name() not in ("pd_op.conv2d", "pd_op.matmul"):
        return 0
    left, right = op.operands_source()[:2]
    summed = right.shape[1:] if op.name() == "pd_op.conv2d" else [left.shape[-2 if op.attrs()["transpose_x"] else -1]]
    return 2 * prod(op.results()[0].shape) * prod(summed)


def _noisy(shapes: Shapes) -> tuple:
    """Noisy latents, levels and the states of captions, into which gradients go."""
    states = _data("states", (shapes.samples, shapes.tokens, shapes.width))
    states.stop_gradient = False
    return _data("noisy", (shapes.samples, *shapes.latents)), _data("levels", (shapes.samples,), "int64"), states


def _autoencoder(network, shapes: Shapes, trained: bool):
    """Only one that is trained decodes."""
    latents = network.encode(_data("pictures", (shapes.samples, *shapes.picture))).latent_dist.mean
    return network.decode(latents).sample if trained else latents


def _text(network, shapes: Shapes):
    return network(_data("tokens", (shapes.samples, shapes.tokens), "int64"))[0]


def _led_unet(network, shapes: Shapes):
    """A control network and its frozen UNet, through whose decoder alone gradients go."""
    base = bare_network("unet", shapes.base)
    base.set_attn_processor(AttnProcessor())
    network.set_attn_processor(AttnProcessor())
    for parameter in base.parameters():
        parameter.stop_gradient = True
    seen = _noisy(shapes)
    seen[-1].stop_gradient = True
    picture = _data("control", (shapes.samples, network.config["conditioning_channels"], *shapes.picture[1:]))
    down, middle = network(*seen, controlnet_cond=picture, return_dict=False)
    added = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    return base(*seen[:2], encoder_hidden_states=seen[-1], **added).sample


def _unet(network, shapes: Shapes):
    network.set_attn_processor(AttnProcessor())
    told, pooled = {}, pooled_width(network.config)
    if pooled is not None:
        sizes = _data("sizes", (shapes.samples, 6), "int64")
        told["added_cond_kwargs"] = {"text_embeds": _data("pooled", (shapes.samples, pooled)), "time_ids": sizes}
        shapes = replace(shapes, width=network.config["cross_attention_dim"])
    noisy, levels, states = _noisy(shapes)
    return network(noisy, levels, encoder_hidden_states=states, **told).sample


def _transformer(network, shapes: Shapes):
    """Stable Diffusion 3's is told of the whole caption too, and words of a T5, or zeros, follow those of CLIPs."""
    if not is_sd3(network.config):
        return transform(network, *_noisy(shapes))
    from ...networks.transformers.mmdit import JointAttention

    network.set_attn_processor(JointAttention())
    words, width = shapes.tokens + (shapes.more or shapes.tokens), network.config["joint_attention_dim"]
    pooled = _data("pooled", (shapes.samples, network.config["pooled_projection_dim"]))
    return transform(network, *_noisy(replace(shapes, tokens=words, width=width)), pooled=pooled)


def _recompute_text(network) -> None:
    if hasattr(network, "to_logits"):
        network.model.gradient_checkpointing = True
    else:
        network.gradient_checkpointing_enable()


# How a network of each kind is called, and told to recompute.
_CALLS: dict[str, Callable] = {
    "vae": _autoencoder,
    "text_encoder": _text,
    "unet": _unet,
    "controlnet": _led_unet,
    "transformer": _transformer,
    **dict.fromkeys(
        ("projected_text_encoder", "text_encoder_2"), lambda network, shapes: _text(network.text_model, shapes)
    ),
    "text_encoder_3": lambda network, shapes: _text(network, replace(shapes, tokens=shapes.more)),
}
_RECOMPUTED: dict[str, Callable] = {
    "text_encoder": _recompute_text,
    **dict.fromkeys(("unet", "controlnet", "transformer"), lambda network: network.enable_gradient_checkpointing()),
}
