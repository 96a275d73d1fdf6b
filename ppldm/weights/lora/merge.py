"""LoRA laid over the weights of a model: W + weight * alpha / r * up @ down, in float32. Several add up. And what the
adapters of a model have learned: as files of their own, and merged into the weights of their base.

Trained rows of a text encoder's table of words lie in learned_embeds.safetensors, {token: [D]} as diffusers'
`load_textual_inversion` reads it, further ones in learned_embeds_1.safetensors and so on; tokenizer/ knows them, and
ppldm.json has their ids.

`extract_lora` is the inverse, the difference of two models as LoRA: of each layer the nearest pair of a rank (Eckart
and Young 1936), by the eigenvectors of the smaller of D D' and D' D in float64, ten times as fast as an SVD.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...utils.checksums import hash_file
from ...utils.errors import ModelError
from ...utils.files import atomic_dir, is_table, read_json_object, write_json
from ..components import ComponentWeights, Weights, is_linear_weight, require_finite
from ..formats.files import read_arrays, write_safetensors
from ..model_file import TOKENIZER_FOLDER
from .files import ADAPTER_CONFIG, COMPONENTS, LORA_FILE, Lora, LoraPair, find_lora, read_lora, write_key, write_lora
from .flag import split_word

TOKEN_FILES = "learned_embeds*.safetensors"
_BY_FILE = ("emb_params", "*")  # of A1111: vectors whose token is the file's name
_TABLES = ("model.embed_tokens.weight", "text_model.embeddings.token_embedding.weight")
_TEXT_ENCODER = "text_encoder"


def add_loras(weights: Weights, words: Sequence[str]) -> Weights:
    """The model with the LoRAs of words such as "FILE:0.8". Raises ConfigError, ModelError for one that is unfit."""
    unet = weights.components.get("unet")
    for word in words:
        file, weight = split_word(word)
        if tokens := any(file.glob(TOKEN_FILES)):  # of the folder of a run
            weights = add_tokens(weights, file)
        if not tokens or Path(file, LORA_FILE).is_file():
            weights = merge_lora(weights, read_lora(file, unet and unet.config), weight)
    return replace(weights, metadata={**weights.metadata, "lora": [*words]}) if words else weights


def identify_loras(words: Sequence[str]) -> list[dict]:
    """Of each word such as "FILE:0.8" the SHA-256 of its file, or files, and the weight. Raises ConfigError."""
    found = []
    for file, weight in map(split_word, words):
        tokens, pairs = [*file.glob(TOKEN_FILES)] if file.is_dir() else [], find_lora(file)
        files = sorted(one for one in (*tokens, pairs, pairs.parent / ADAPTER_CONFIG) if one.is_file())
        found.append({"sha256": [hash_file(one) for one in files], "weight": weight})
    return found


def merge_lora(weights: Weights, lora: Lora, weight: float = 1.0) -> Weights:
    """A model with the pairs of `lora`, times `weight`, in new arrays. Raises ModelError where a layer does not fit."""
    components = dict(weights.components)
    for name, layers in lora.components.items():
        if name not in components:
            raise ModelError(f"{lora.source} changes the {name}, and the model has none; give a LoRA for this model")
        components[name] = _merge(components[name], name, layers, lora.source, weight)
    return replace(weights, components=components)


def _merge(component: ComponentWeights, name: str, layers: dict, source: str, weight: float) -> ComponentWeights:
    arrays = dict(component.arrays)
    # By underscores, for a file of kohya's: in one network no two layers have the same.
    place = component.source or "the model"
    own = {key.removesuffix(".weight").replace(".", "_"): key for key in arrays if key.endswith(".weight")}
    for layer, pair in layers.items():
        key = own.get(layer.replace(".", "_"))
        if key is None:
            raise ModelError(f"{source} changes {name} {layer}, and {place} has no such layer")
        array = arrays[key]
        shape = array.shape[::-1] if is_linear_weight(key, array) else array.shape
        if _flat(pair.shape) != _flat(shape):
            raise ModelError(
                f"{source} changes {name} {layer} as a weight of {list(pair.shape)}, and it is {list(shape)} in {place}"
            )
        change = (np.float32(weight) * pair.change).reshape(shape)
        arrays[key] = array.astype(np.float32) + (change.T if is_linear_weight(key, array) else change)
    return replace(component, arrays=arrays)


def _flat(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape in which a convolution of 1 x 1 is a linear layer, as it is in some files."""
    return tuple(shape[:2]) if set(shape[2:]) <= {1} else tuple(shape)


def write_adapters(model, folder: Path, average, metadata: dict) -> None:
    """Write to `folder` what other programs read, of averaged values where there are some; and ppldm.json."""
    with atomic_dir(folder) as target, average.applied() if average else nullcontext():
        lora = lora_of(model)
        if lora.components:
            write_lora(lora, target)
        ids, rows = tokens_of(model)
        write_tokens(dict(zip(ids, rows, strict=True)), target)
        if model.tokenizer:
            model.tokenizer.save(target / TOKENIZER_FOLDER)
        write_json(target / "ppldm.json", {**metadata, "tokens": ids, "ema": average is not None})


def lora_of(model) -> Lora:
    """The low-rank pairs of a model, copied."""
    found: dict[str, dict] = {}
    for one in (one for one in model.adapters.values() if one.kind == "lora"):
        found[one.network] = {}
        for name, layer in one.layers.items():
            down, up = layer.down.numpy(), layer.up.numpy()
            found[one.network][name] = LoraPair(*((down, up) if down.ndim > 2 else (down.T, up.T)), one.alpha)
    return Lora(found, source="this run")


def tokens_of(model) -> tuple[dict[str, int], np.ndarray]:
    """(ids of the tokens that a model has trained, by token; their rows [T, D] float32)."""
    for one in model.adapters.values():
        if one.kind == "tokens":
            return dict(zip(one.tokens, one.ids, strict=True)), one.rows().detach().numpy()
    return {}, np.zeros((0, 0), np.float32)


def merged(weights: Weights, model) -> Weights:
    """The weights of the networks of `model` with those of its adapters in them."""
    weights = merge_lora(weights, lora_of(model))
    ids, rows = tokens_of(model)
    if ids:
        text_encoder = with_rows(weights.components["text_encoder"], [*ids.values()], rows)
        weights.components = {**weights.components, "text_encoder": text_encoder}
    return weights


def write_tokens(rows: dict[str, np.ndarray], folder: Path) -> None:
    """Write one file for each token."""
    require_finite(rows, "the tokens")
    for number, (token, row) in enumerate(rows.items()):
        write_safetensors(folder / f"learned_embeds{f'_{number}' * (number > 0)}.safetensors", {token: row}, "pt")


def read_tokens(path) -> dict[str, np.ndarray]:
    """The vectors [n, D] float32 by token of a file, ours, diffusers' or A1111's, or of all in a folder. Raises
    ModelError."""
    path, found = Path(path), dict[str, np.ndarray]()
    files = next(filter(None, (sorted(path.glob(name)) for name in (TOKEN_FILES, "learned_embeds*.bin"))), [path])
    for file in files:
        for token, rows in read_arrays(file).items():
            if rows.ndim not in (1, 2) or not rows.size or rows.dtype.kind != "f":
                raise ModelError(f"{file}: {token:.80} is no vectors but {list(rows.shape)}; give another file")
            found[file.stem if token in _BY_FILE else token] = np.atleast_2d(rows).astype(np.float32)
    require_finite(found, f"the textual inversion {path}")
    return found


def add_tokens(weights: Weights, folder) -> Weights:
    """The model with the rows that a run has left in `folder`, and with its tokenizer. Raises ModelError."""
    folder, text_encoder = Path(folder), weights.components[_TEXT_ENCODER]
    ids, rows = read_json_object(folder / "ppldm.json", ModelError, inside=True).get("tokens", {}), read_tokens(folder)
    words, width = text_encoder.arrays[find_table(text_encoder.arrays)].shape
    most = words + len(ids) if is_table(ids, int) else 0
    fits = ids.keys() == rows.keys() and all(0 <= number < most for number in ids.values()) if most else False
    if not fits or any(own.shape != (1, width) for own in rows.values()):
        raise ModelError(f"the tokens in {folder} do not fit its ppldm.json and a text encoder of width {width}")
    component = with_rows(text_encoder, [*ids.values()], np.concatenate([rows[token] for token in ids]))
    components = {**weights.components, _TEXT_ENCODER: component}
    return replace(weights, components=components, tokenizer=folder / TOKENIZER_FOLDER)


def with_rows(text_encoder: ComponentWeights, ids: list[int], rows: np.ndarray) -> ComponentWeights:
    """A text encoder with these rows [T, D] in its table of words, which grows where ids are behind it."""
    arrays = text_encoder.arrays
    table = find_table(arrays)
    size = max(len(arrays[table]), max(ids) + 1)
    more = size - len(arrays[table])
    words = np.pad(arrays[table], ((0, more), (0, 0)))
    words[ids] = rows
    arrays = {**arrays, table: words}
    if "to_logits.weight" in arrays:
        arrays["to_logits.weight"] = np.pad(arrays["to_logits.weight"], ((0, 0), (0, more)))
        arrays["to_logits.bias"] = np.pad(arrays["to_logits.bias"], (0, more))
    return replace(text_encoder, arrays=arrays, config={**text_encoder.config, "vocab_size": size})


def find_table(arrays: dict) -> str:
    return next(key for key in _TABLES if key in arrays)


@dataclass(frozen=True)
class Kept:
    """What of the difference of one component a LoRA holds: the share of the sum of squares, how many layers have a
    pair, and the parameters left out, which differ and are not weights of linear layers or convolutions."""

    share: float
    layers: int
    left_out: tuple[str, ...]


def extract_lora(base: Weights, tuned: Weights, rank: int) -> tuple[Lora, dict[str, Kept]]:
    """(pairs of at most that rank, by component what they hold). Raises ModelError for unlike, or equal, networks."""
    pairs, kept = {}, {}
    for name in COMPONENTS:
        if name in base.components and name in tuned.components:
            pairs[name], kept[name] = _extract(name, base.components[name], tuned.components[name], rank)
    if not any(pairs.values()):
        raise ModelError("the two models do not differ in any linear layer or convolution; give two that do")
    return Lora({name: own for name, own in pairs.items() if own}), kept


def check_keys(base: Weights, tuned: Weights, form: str) -> None:
    """Raises ModelError, before the long search, where a layer differs that `form` has no name for."""
    before, after = (model.components.get("text_encoder") for model in (base, tuned))
    for key, array in before.arrays.items() if before and after else ():
        if _is_layer(key, array) and not np.array_equal(array, after.arrays.get(key, array)):
            write_key("text_encoder", key.removesuffix(".weight"), "down", form)


def nearest_pair(change: np.ndarray, rank: int) -> LoraPair:
    """The pair of at most `rank` that is nearest to `change`, [out, in] or [out, in, kh, kw], in the sum of squares."""
    from scipy.linalg import eigh

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
