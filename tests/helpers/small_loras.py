"""LoRAs of small models, and the names of the layers that they change."""

import numpy as np

from ppldm.weights.components import ComponentWeights, turn_linear
from ppldm.weights.lora.files import Lora, LoraPair


def layers_of(component: ComponentWeights) -> dict[str, tuple[int, ...]]:
    """The weights' shapes of linear layers and convolutions, in PyTorch's orientation."""
    return {
        name.removesuffix(".weight"): array.shape
        for name, array in turn_linear(component.arrays).items()
        if array.ndim in (2, 4) and name.endswith(".weight") and "embed_" not in name and "_embedding." not in name
    }


def small_lora(components: dict[str, ComponentWeights], rank=2, alpha=1.0, seed=0, dtype="float32", of="") -> Lora:
    """Random pairs for every layer of the components whose name holds `of`. rank: a number, or of a shape the rank."""
    rng = np.random.default_rng(seed)

    def pair(shape) -> LoraPair:
        own = rank if isinstance(rank, int) else rank(shape)
        down, up = (own, *shape[1:]), (shape[0], own, *(1 for _ in shape[2:]))
        return LoraPair(*(rng.standard_normal(one).astype(dtype) * dtype_scale for one in (down, up)), alpha)

    dtype_scale = np.asarray(0.125, dtype)
    found = {
        name: {layer: pair(shape) for layer, shape in layers_of(component).items() if of in layer}
        for name, component in components.items()
    }
    return Lora(found)


def differences(one: Lora, other: Lora) -> list[str]:
    """Where two LoRAs differ: in a layer, or in a bit of a pair."""
    a, b = (
        {(component, layer): pair for component, layers in lora.components.items() for layer, pair in layers.items()}
        for lora in (one, other)
    )
    return [f"{key}" for key in a.keys() ^ b.keys()] + [
        f"{key}" for key in a.keys() & b.keys() if not _same(a[key], b[key])
    ]


def _same(a: LoraPair, b: LoraPair) -> bool:
    return a.alpha == b.alpha and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in ((a.down, b.down), (a.up, b.up))
    )
