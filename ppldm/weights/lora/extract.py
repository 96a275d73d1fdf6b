"""The difference of two models as LoRA: of each layer, the pair of a rank that is nearest to it.

By Eckart and Young (1936) that is the part of the difference with the largest singular values. They come from the
eigenvectors of the smaller of D D' and D' D in float64, which is ten times as fast as the whole decomposition.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from ...utils.errors import ModelError
from ..components import ComponentWeights, Weights, is_linear_weight, require_finite
from .files import Lora, LoraPair
from .keys import COMPONENTS, write_key


@dataclass(frozen=True)
class Kept:
    """What of the difference of one component a LoRA holds. share: of the sum of squares of the whole difference.
    layers: how many have a pair. left_out: the parameters that differ and are not weights of linear layers or
    convolutions."""

    share: float
    layers: int
    left_out: tuple[str, ...]


def extract_lora(base: Weights, tuned: Weights, rank: int) -> tuple[Lora, dict[str, Kept]]:
    """(pairs of at most that rank, float32, alpha = rank; by component what they hold). Raises ModelError where the two
    have not the same networks, or do not differ."""
    pairs, kept = {}, {}
    for name in COMPONENTS:
        if name in base.components and name in tuned.components:
            pairs[name], kept[name] = _extract(name, base.components[name], tuned.components[name], rank)
    if not any(pairs.values()):
        raise ModelError("the two models do not differ in any linear layer or convolution; give two that do")
    return Lora({name: own for name, own in pairs.items() if own}), kept


def check_keys(base: Weights, tuned: Weights, form: str) -> None:
    """Raises ModelError where a layer differs that a file of `form` has no name for: before the pairs are sought, which
    takes minutes."""
    before, after = (model.components.get("text_encoder") for model in (base, tuned))
    for key, array in before.arrays.items() if before and after else ():
        if _is_layer(key, array) and not np.array_equal(array, after.arrays.get(key, array)):
            write_key("text_encoder", key.removesuffix(".weight"), "down", form)


def nearest_pair(change: np.ndarray, rank: int) -> LoraPair:
    """The pair of at most `rank` that is nearest to `change`, [out, in] or [out, in, kh, kw], in the sum of squares."""
    flat = change.reshape(len(change), -1).astype(np.float64)
    wide = flat if flat.shape[0] <= flat.shape[1] else flat.T
    size = len(wide)
    rank = min(rank, size)
    values, vectors = eigh(wide @ wide.T, subset_by_index=(size - rank, size - 1))
    # Both arrays get the root of the singular values, so that neither is too small for float16.
    scale = np.maximum(values, values[-1] * 1e-16) ** 0.25
    short, long = vectors * scale, (vectors / scale).T @ wide
    up, down = (short, long) if wide is flat else (long.T, short.T)
    ones = (1,) * (change.ndim - 2)
    return LoraPair(
        down.astype(np.float32).reshape(rank, *change.shape[1:]),
        up.astype(np.float32).reshape(len(change), rank, *ones),
        float(rank),
    )


def _is_layer(key: str, array: np.ndarray) -> bool:
    return is_linear_weight(key, array) or array.ndim == 4


def _extract(name: str, base: ComponentWeights, tuned: ComponentWeights, rank: int) -> tuple[dict, Kept]:
    pairs, left_out, total, held = {}, [], 0.0, 0.0
    if base.arrays.keys() != tuned.arrays.keys():
        odd = min(base.arrays.keys() ^ tuned.arrays.keys())
        raise ModelError(f"only one of {base.source} and {tuned.source} has {name} {odd}; give two of one network")
    for key, before in base.arrays.items():
        after = tuned.arrays[key]
        if before.shape != after.shape:
            raise ModelError(
                f"{name} {key} is {list(before.shape)} in {base.source} and {list(after.shape)} in {tuned.source}; "
                "give two of one network"
            )
        change = after.astype(np.float32) - before.astype(np.float32)
        norm = float(np.sum(np.square(change, dtype=np.float64)))
        if not np.isfinite(norm):
            require_finite({key: change}, f"the difference of {base.source} and {tuned.source}")
        total += norm
        if not norm:
            continue
        if not _is_layer(key, change):
            left_out.append(key)
            continue
        pair = nearest_pair(change.T if change.ndim == 2 else change, rank)
        pairs[key.removesuffix(".weight")] = pair
        held += pair.squared_norm
    return pairs, Kept(held / total if total else 1.0, len(pairs), tuple(left_out))
