"""`ppldm lora merge | extract | convert | show`: what is done with LoRA files besides training and drawing."""

import math
from typing import Annotated

from ..utils.errors import ConfigError
from ..utils.files import local_path
from ..utils.text import print_report
from ..weights.lora.flag import Loras
from .export import export

_Out = Annotated[str, {"opt": True, "required": True}]
_Form = Annotated[str, {"opt": True, "choices": ["diffusers", "kohya"]}]
_Dtype = Annotated[str, {"opt": True, "choices": ["float32", "float16"]}]
_Loras = Annotated[list[str], {**Loras.__metadata__[0], "opt": True, "required": True}]


def merge(
    model: str,  # pipeline folder, checkpoint, CompVis' .ckpt, or a name
    out: _Out,  # folder to write; one that is there is replaced
    lora: _Loras,  # LoRA files, whose changes add up; a negative weight takes a merged one out again
    to: Annotated[str, {"opt": True, "choices": ["ppdiffusers", "diffusers", "compvis"]}] = "ppdiffusers",  # whose form
    ema: bool = False,  # the averaged weights of a checkpoint or a .ckpt
    dtype: _Dtype = "float32",  # of the weights written
    offline: bool = False,  # never touch the network
):
    """Write a model with LoRAs merged into its weights."""
    export(model, out, to=to, ema=ema, dtype=dtype, offline=offline, lora=lora)


def extract(
    base: _Out,  # the model before: pipeline folder, checkpoint, CompVis' .ckpt, or a name
    tuned: _Out,  # the model after
    out: _Out,  # .safetensors file to write, or a folder for it
    rank: int = 16,  # of each layer's pair
    to: _Form = "diffusers",  # whose keys
    dtype: _Dtype = "float32",  # of the arrays written
    ema: bool = False,  # the averaged weights of the tuned model, where it is a checkpoint or a .ckpt
    offline: bool = False,  # never touch the network
    json: bool = False,  # print the numbers as JSON
):
    """Write the difference of two models as LoRA, and say how much of it is kept."""
    if rank < 1:
        raise ConfigError(f"--rank {rank} must be 1 or more; 16 is usual")
    target = local_path(out)
    from ..weights.folders import FOLDERS, FURTHER_TEXT_ENCODERS
    from ..weights.lora.files import COMPONENTS, write_lora
    from ..weights.lora.merge import check_keys, extract_lora
    from ..weights.source import open_model

    kinds = [name for name in COMPONENTS if name in (*FOLDERS, *FURTHER_TEXT_ENCODERS)]  # of text-to-image models
    before = open_model(base, offline).read(kinds)
    after = open_model(tuned, offline, ema=ema).read(kinds)
    check_keys(before, after, to)
    lora, kept = extract_lora(before, after, rank)
    lora.metadata.update(base=base, tuned=tuned)
    file = write_lora(lora.cast(dtype), target, to)
    report = {"file": str(file), "rank": rank, "components": {name: vars(one) for name, one in kept.items()}}
    print_report(report, describe_extracted, json)


def convert(
    file: str,  # LoRA file of diffusers' or kohya's keys
    out: _Out,  # .safetensors file to write, or a folder for it
    to: _Form = "kohya",  # whose keys
    dtype: Annotated[str, {"opt": True, "choices": ["same", "float32", "float16"]}] = "same",  # of the arrays written
):
    """Write a LoRA file in the keys of diffusers or of kohya's scripts."""
    from ..utils.log import get_logger
    from ..weights.lora.files import read_lora, write_lora

    lora = read_lora(file)
    written = write_lora(lora if dtype == "same" else lora.cast(dtype), local_path(out), to)
    get_logger().info("%s for %s in %s", file, to, written)


def show(
    file: str,  # LoRA file of diffusers' or kohya's keys
    json: bool = False,  # print the numbers as JSON
):
    """Say what a LoRA file holds: ranks, alphas, layers and the size of the change by component, metadata."""
    from ..weights.lora.files import read_lora

    lora = read_lora(file)
    report = {
        "file": lora.source,
        "components": {name: survey(layers) for name, layers in lora.components.items()},
        "metadata": lora.metadata,
    }
    print_report(report, describe, json)


def survey(layers: dict) -> dict:
    """What the pairs of one component are. norm: the root of the sum of the squares of all their changes."""
    pairs = layers.values()
    return {
        "layers": len(layers),
        "ranks": sorted({pair.rank for pair in pairs}),
        "alphas": sorted({pair.alpha for pair in pairs}),
        "dtypes": sorted({pair.down.dtype.name for pair in pairs}),
        "parameters": sum(pair.down.size + pair.up.size for pair in pairs),
        "norm": math.sqrt(sum(pair.squared_norm for pair in pairs)),
        "norms": {layer: math.sqrt(pair.squared_norm) for layer, pair in layers.items()},
    }


def describe(report: dict) -> str:
    """A report of `show` as text."""
    lines = [report["file"]]
    for name, own in report["components"].items():
        ranks, alphas = (", ".join(f"{one:g}" for one in own[key]) for key in ("ranks", "alphas"))
        lines.append(
            f"{name}: {own['layers']} layers, {own['parameters']:,} parameters ({', '.join(own['dtypes'])}); "
            f"rank {ranks}, alpha {alphas}; norm of the change {own['norm']:.4g}"
        )
        largest = sorted(own["norms"].items(), key=lambda one: -one[1])[:3]
        lines += [f"  {norm:9.4g}  {layer}" for layer, norm in largest]
    lines += [f"{key}: {value}" for key, value in sorted(report["metadata"].items())]
    return "\n".join(lines)


def describe_extracted(report: dict) -> str:
    """A report of `extract` as text."""
    lines = [f"{report['file']}: rank {report['rank']}"]
    for name, own in report["components"].items():
        left = own["left_out"]
        also = f"; left out: {len(left)} parameters such as {left[0]}" if left else ""
        lines.append(f"{name}: {own['layers']} layers hold {own['share']:.2%} of the difference{also}")
    return "\n".join(lines)
