"""`--dry_run`: what a recipe trains, the memory and the operations that it takes, without taking them.

Bytes of each device for N trained parameters, as the optimizer and `networks/ema.py` keep them: weights 4 a parameter,
trained or not, adapters too; with half precision at level O2 half of it, but for the VAE, and 4 N of float32 masters
in the optimizer. Gradients 4 N; AdamW's moments 8 N, 4 of Muon's matrices, 2 in 8 bits; a moving average 4 N, in host
memory none. `--sharding stage1` divides what the optimizer has by the devices, stage2 gradients too, stage3 trained
weights and averages too, but for the layers that are gathered at a time. Activations are counted (`doctor.memory`);
what the device's libraries take comes on top.
"""

from dataclasses import replace
from math import prod

import numpy as np

from ...config.recipe import Recipe
from ...config.training import AT_A_TIME, SHARDING_STAGES
from ...data.text.tokenizer import load_tokenizer
from ...families.base import get_family
from ...families.ldm_build import tokenizer_source
from ...networks.adapters import TEXT_ENCODER, plan_tokens
from ...utils.text import print_report
from ...weights.components import is_linear_weight
from ...weights.fill import parameter_shapes
from ...weights.lora.merge import find_table
from ...weights.model_file import class_of

SPEED = 1e14  # floating-point operations a second that hours are forecast for: a third of an A100's in bfloat16
ENDLESS = 10**9  # updates, of presets that are to be stopped by hand
UNUSED = "to_logits."  # of LDMBert: kept, and never trained
_ENCODING = ("encoder.", "quant_conv.")  # of an autoencoder


def dry_run(recipe: Recipe, num_devices: int, as_json: bool, forecast) -> None:
    """Print it. forecast: that of `doctor.memory`. Raises ConfigError, ModelError."""
    print_report(reckon(recipe, num_devices) | forecast(recipe, num_devices), describe, as_json)


def reckon(recipe: Recipe, num_devices: int) -> dict:
    """Components with their parameters, samples of an update, bytes of a device by purpose, those of weights that only
    other devices have at a time, of averages in host memory, bytes on the disk."""
    family, arguments = get_family(recipe.family), recipe.training
    halves = (arguments.fp16 or arguments.bf16) and arguments.fp16_opt_level == "O2"
    components, weights, spared, largest = {}, 0, 0, 0
    untrained = (UNUSED, *(_ENCODING if getattr(recipe.model, "train_decoder_only", False) else ()))
    saved, exported, learned, added = (np.zeros(2, dtype=np.int64) for _ in range(4))  # (numbers, arrays), saved: bytes
    for name, network in family.networks(recipe.model, recipe.data).items():
        kind = family.components[name]
        shapes = parameter_shapes(kind, network.config, name)
        sizes = {key: prod(shape) for key, shape in shapes.items()}
        learning = {key: size for key, size in sizes.items() if network.trained and not key.startswith(untrained)}
        own = [*learning.values()]
        more = np.add(_low_rank(name, shapes, recipe.model), _tokens(name, shapes, recipe.model))
        components[name] = {"class": class_of(kind, network.config), "parameters": sum(sizes.values())}
        components[name]["trained"] = sum(own) + int(more[0])
        num_bytes = sum(sizes.values()) * (2 if halves and kind != "vae" else 4)
        weights += num_bytes + 4 * int(more[0])
        saved += np.multiply(name not in family.unsaved(recipe.model), (num_bytes, len(sizes)))
        exported += np.multiply(name in family.exported(recipe.model), (sum(sizes.values()), len(sizes)))
        learned += np.add((sum(own), len(own)), more)
        largest = max(largest, *own, 0)
        added += more
        spared += _spared_bytes(arguments.optimizer, {key: shapes[key] for key in learning})
    trained = int(learned[0])
    shares = [num_devices if arguments.sharding in SHARDING_STAGES[stage:] else 1 for stage in range(3)]
    moments = (12 if halves else 8) * trained - spared
    average, share = 4 * trained * count_averages(recipe), -(-4 * trained // shares[2])
    elsewhere = 0 if shares[2] == 1 else max(0, 4 * trained - share - max(int(AT_A_TIME * share), 4 * largest))
    sizes = {"weights": weights - elsewhere, "gradients": -(-4 * trained // shares[1])}
    offloaded = average * getattr(recipe.model, "offload_ema", False)
    sizes |= {"optimizer": -(-moments // shares[0]), "average": -(-(average - offloaded) // shares[2])}
    report = {"family": recipe.family, "components": components, "num_devices": num_devices}
    on_disk = _on_disk(recipe, moments + average, saved, exported, learned, added)
    report |= {"samples_an_update": arguments.samples_of_update(num_devices), "bytes_offloaded": offloaded}
    return report | {"bytes_a_device": sizes, "bytes_on_disk": on_disk, "bytes_elsewhere": elsewhere}


def count_averages(recipe: Recipe, of_export: bool = False) -> int:
    """How many averages a run keeps; `of_export`: that its exported model is made of."""
    own = int(bool(get_family(recipe.family).average(recipe.model)))
    return own if of_export else own + len(getattr(recipe.model, "ema_posthoc", None) or ())


def _on_disk(recipe: Recipe, states: int, saved, exported, learned, added) -> dict[str, int]:
    """Bytes of a checkpoint, of what is exported at the end, and of the averages of `--ema_posthoc` at one time.
    states: bytes of the optimizer and of averages; saved: (bytes, arrays) of a checkpoint's weights; exported, learned,
    added: (numbers, arrays) of what is exported, of what is trained, and of adapters."""
    config = recipe.model
    if added[0]:
        saved, exported = added * (4, 1), added + exported * getattr(config, "export_merged", False)
    arrays = int(saved[1] + learned[1] * (4 + count_averages(recipe)))  # moments, their powers
    stds = getattr(config, "ema_posthoc", None) or ()
    width = 2 if stds and config.ema_posthoc_dtype == "float16" else 4
    return {
        "checkpoint": int(saved[0]) + states + _ENTRY_BYTES * arrays + _TEXT_BYTES,
        "exported": int(4 * exported[0] + _ENTRY_BYTES * exported[1]) + _TEXT_BYTES,
        "snapshots": int(width * learned[0] + _ENTRY_BYTES // 2 * learned[1]) * len(stds),
    }


def _spared_bytes(optimizer: str, shapes: dict) -> int:
    """By how much its moments of these parameters are smaller than AdamW's."""
    if optimizer == "muon":
        from ...methods.muon import is_hidden_matrix

        return sum(4 * prod(shape) for key, shape in shapes.items() if is_hidden_matrix(key, shape))
    if optimizer == "adamw8bit":
        from ...methods.adamw8bit import BLOCK, SMALLEST

        sizes = [size for size in map(prod, shapes.values()) if size >= SMALLEST]
        return sum(8 * size - 2 * (BLOCK + 4) * -(-size // BLOCK) for size in sizes)
    return 0


def _low_rank(name: str, shapes: dict, config) -> tuple[int, int]:
    """(numbers, arrays) of a network's low-rank adapters, if it gets some."""
    if not getattr(config, "lora_rank", None) or name not in config.lora_components:
        return 0, 0
    chosen = ((key, shape) for key, shape in shapes.items() if any(part in key for part in config.lora_modules))
    adapted = [shape for key, shape in chosen if len(shape) == 4 or is_linear_weight(key, np.empty([0] * len(shape)))]
    return sum(config.lora_rank * (shape[0] + prod(shape[1:])) for shape in adapted), 2 * len(adapted)


def _tokens(name: str, shapes: dict, config) -> tuple[int, int]:
    """(numbers, arrays) of the rows that a network's tokens get. Only for those of the vocabulary is it read."""
    if name != TEXT_ENCODER or not getattr(config, "train_tokens", None):
        return 0, 0
    wanted = config.wanted_tokens()
    if any(pattern is None for _, pattern in wanted):
        source = tokenizer_source(replace(config, offline=True))
        wanted = plan_tokens(wanted, load_tokenizer(source, config.model_max_length, offline=True).vocab)
    return len(wanted) * shapes[find_table(shapes)][1], 1


_ENTRY_BYTES = 240  # of an array in a .pdparams beside its numbers, and half of that in a .safetensors: measured
_TEXT_BYTES = 17_000  # of a checkpoint's, or an exported model's, configs, recipe and records


def describe(report: dict) -> str:
    """For people."""
    parts, sizes = report["components"], report["bytes_a_device"]
    lines = [f"family {report['family']}, {report['num_devices']} device(s), {report['samples_an_update']:,} samples "
             "an update"]  # fmt: skip
    lines += [
        f"  {name:<13} {part['class']:<21} {part['parameters']:>13,} parameters, {part['trained']:>13,} trained"
        for name, part in parts.items()
    ]
    counts = [f"{sum(part[name] for part in parts.values()):>13,}" for name in ("parameters", "trained")]
    lines += [f"  {'in all':<35} {counts[0]} parameters, {counts[1]} trained"]
    sizes = sizes | {"activations": report["bytes_of_activations"]}
    lacking = f", without the activations of {', '.join(report['not_counted'])}" if report["not_counted"] else ""
    lines += [f"memory of each device, in GB{lacking}:"]
    lines += [f"  {name:<11} {size / 1e9:8.2f}" for name, size in {**sizes, "in all": sum(sizes.values())}.items()]
    time = f"{report['operations_an_update'] / 1e12:,.3g} TFLOP a device and update"
    if report["hours"] is not None:
        time += f"; {report['updates']:,} updates: {report['hours']:,.3g} h at {SPEED / 1e12:.0f} TFLOP/s"
    lines += [f"{time} (`ppldm doctor` measures on a CPU)"]
    lines += ["on the disk, in GB:"]
    lines += [f"  {name:<10} {size / 1e9:8.2f}" for name, size in report["bytes_on_disk"].items()]
    return "\n".join(lines)
