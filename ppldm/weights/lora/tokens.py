"""Rows of a text encoder's table of words that were trained beside a LoRA, or by themselves (textual inversion).

learned_embeds.safetensors   {token: [D]}, as diffusers' `load_textual_inversion` reads it; further tokens in
                             learned_embeds_1.safetensors and so on, for that takes one a file
tokenizer/                   with the new tokens
ppldm.json                   "tokens": their ids
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...utils.errors import ModelError
from ...utils.files import is_table, read_json_object
from ..components import ComponentWeights, Weights, require_finite
from ..formats.files import read_arrays, write_safetensors
from ..model_file import TOKENIZER_FOLDER

TOKEN_FILES = "learned_embeds*.safetensors"
_TABLES = ("model.embed_tokens.weight", "text_model.embeddings.token_embedding.weight")
_TEXT_ENCODER = "text_encoder"


def write_tokens(rows: dict[str, np.ndarray], folder: Path) -> None:
    """Write one file for each token."""
    require_finite(rows, "the tokens")
    for number, (token, row) in enumerate(rows.items()):
        write_safetensors(folder / f"learned_embeds{f'_{number}' * (number > 0)}.safetensors", {token: row}, "pt")


def has_tokens(folder) -> bool:
    """Whether there are such files."""
    return any(Path(folder).glob(TOKEN_FILES))


def read_tokens(path) -> dict[str, np.ndarray]:
    """The rows [D] float32 by token of a file, or of all in a folder, that this or diffusers' scripts have written.
    Raises ModelError."""
    path = Path(path)
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.glob(TOKEN_FILES)) if path.is_dir() else [path]:
        for token, row in read_arrays(file).items():
            if row.ndim == 0 or row.size != row.shape[-1] or row.dtype.kind != "f":
                raise ModelError(f"{file}: {token} is not one vector but {list(row.shape)}; give another file")
            found[token] = row.reshape(-1).astype(np.float32)
    return found


def add_tokens(weights: Weights, folder) -> Weights:
    """The model with the rows that a run has left in `folder`, and with its tokenizer. Raises ModelError."""
    folder, text_encoder = Path(folder), weights.components[_TEXT_ENCODER]
    ids, rows = read_json_object(folder / "ppldm.json", ModelError, inside=True).get("tokens", {}), read_tokens(folder)
    words, width = text_encoder.arrays[find_table(text_encoder.arrays)].shape
    most = words + len(ids) if is_table(ids, int) else 0
    fits = ids.keys() == rows.keys() and all(0 <= number < most for number in ids.values()) if most else False
    if not fits or any(len(row) != width for row in rows.values()):
        raise ModelError(f"the tokens in {folder} do not fit its ppldm.json and a text encoder of width {width}")
    component = with_rows(text_encoder, [*ids.values()], np.stack([rows[token] for token in ids]))
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
