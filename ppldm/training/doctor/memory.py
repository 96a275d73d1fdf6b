"""How much memory a run takes at its peak (docs/training.md has the formula, and what it was measured against).

states       weights, gradients, the optimizer's moments and masters, averages: `dry_run.reckon`
activations  of the trained networks what they keep, and the most that one of them needs beyond that; or of a
             frozen network what it needs, where that is more (`activations`)
batches      what loader processes have ready
process      on a device without a memory of its own: the program and its libraries
heap         there: what the C library keeps of what was given back
copy         there: of what a checkpoint holds, with --use_async_save
export       what is exported last, as it is written, where that is more than the activations, which are gone then
reading      there: the weights that a model starts from, as they are read, where that is more than what comes later
"""

from dataclasses import dataclass, field

import numpy as np

from ...config.recipe import Recipe
from ...data.shapes import make_shapes
from ...families.base import get_family
from ...utils.machine.devices import current_kind
from ...utils.machine.resources import resident_memory_bytes
from ..commands.dry_run import count_averages, reckon
from .activations import Activations, Shapes, count_activations

# Fitted to runs of the tiny networks (benchmarks/memory.py).
FIRST_UPDATE_BYTES = 120_000_000  # threads, kernels and their buffers, that an import does not bring
HEAP_SHARE = 0.3  # of activations, that glibc keeps without using it
LOADER_BYTES = 20_000_000  # that a loader process writes for itself: 15 MB were measured
_BATCHES_A_LOADER = 2


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
    """The peak of a device, or of the process that trains on a kind of device without a memory of its own. Raises
    ConfigError, ModelError."""
    process = resident_memory_bytes()
    family, arguments = get_family(recipe.family), recipe.training
    reckoned = reckon(recipe, num_devices)
    states, on_disk = reckoned["bytes_a_device"], reckoned["bytes_on_disk"]
    networks = family.networks(recipe.model, recipe.data)
    configs = {family.components[name]: one.config for name, one in networks.items()}
    adapted = getattr(recipe.model, "lora_components", ()) if getattr(recipe.model, "lora_rank", None) else ()
    sides = make_shapes(recipe.data) or [(recipe.data.resolution, recipe.data.resolution)]
    height, width = max(sides, key=np.prod)
    tokens = getattr(recipe.model, "model_max_length", 0)
    shapes = Shapes.of(configs, arguments.per_device_train_batch_size, height, width, tokens)
    led = ("unet",) if "controlnet" in configs else ()  # counted with what leads it
    cached = {"vae": recipe.data.latents == "cached", "text_encoder": recipe.data.text_embeddings == "cached"}
    found, unknown, operations = {}, [], 0
    for name, network in networks.items():
        kind, trained = family.components[name], network.trained or name in adapted
        if cached.get(kind) or name in led:
            continue
        counted = count_activations(kind, network.config, shapes, trained, arguments.recompute)
        if counted is None:
            unknown.append(name)
        else:
            found[name] = counted
            passes = 1 + trained * (1 + network.trained + arguments.recompute)  # gradients of values, of weights
            operations += counted.operations * passes
    kind = current_kind()
    activations = _peak(list(found.values()))
    if (arguments.bf16 or arguments.fp16) and kind.mixed_precision:
        activations //= 2
    sample = 3 * height * width + 12 * int(np.prod(shapes.latents)) + 8 * tokens
    loaders = arguments.dataloader_num_workers
    parts = {**states, "activations": activations}
    if not kind.own_memory:
        parts["batches"] = (_BATCHES_A_LOADER * max(loaders, 2) + 1) * shapes.samples * sample if loaders else 0
        parts["process"] = process + FIRST_UPDATE_BYTES
        parts["heap"] = int(HEAP_SHARE * activations)
        parts["copy"] = on_disk["checkpoint"] if arguments.use_async_save else 0
        average = states["average"] * count_averages(recipe, of_export=True) // max(1, count_averages(recipe))
        exported = on_disk["exported"] + average - states["gradients"]  # which are let go before
        parts["export"] = max(0, exported - activations - parts["heap"])
        later = sum(states.values()) - states["weights"] + activations + parts["heap"] + parts["export"]
        parts["reading"] = max(0, _read_bytes(family, recipe, reckoned["components"]) - later)
    return Memory(parts, tuple(unknown), shapes.samples * sample, on_disk, operations)


def _read_bytes(family, recipe: Recipe, components: dict) -> int:
    """Of the weights that a model starts from: all are there when its networks are made, before anything is trained."""
    places = family.places(recipe.model) if hasattr(family, "places") else {}
    return sum(4 * components[name]["parameters"] for name, place in places.items() if place and name in components)


def _peak(networks: list[Activations]) -> int:
    """Of networks that run one after the other, where what is kept stays until all have run."""
    kept = sum(one.kept for one in networks)
    return kept + max((one.peak - one.kept for one in networks), default=0)


def loader_bytes(memory: Memory, num_loaders: int, anonymous: int) -> int:
    """What the loader processes of a device take at most, beside the batches that they share with the main process.

    They are forked and begin with its memory, `anonymous` bytes of the program and, on a CPU, weights and averages. A
    page stays shared until one of them writes to it: so all loaders together hold one more copy of what the main
    process has written since. For itself each has `LOADER_BYTES`, and a batch in its making, twice at most.
    """
    if not num_loaders:
        return 0
    on_host = memory.by_purpose if "process" in memory.by_purpose else {}
    inherited = anonymous + sum(on_host.get(name, 0) for name in ("weights", "average"))
    return inherited + num_loaders * (LOADER_BYTES + 2 * memory.batch_bytes)
