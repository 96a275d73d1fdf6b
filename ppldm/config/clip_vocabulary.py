"""The vocabulary of CLIP, which is part of this package: single files of Stable Diffusion bring none.

`clip_merges.txt.gz` holds the 48,894 pairs that CLIP uses of bpe_simple_vocab_16e6.txt of github.com/openai/CLIP
(Copyright (c) 2021 OpenAI, MIT License). All ids follow from them, as in `simple_tokenizer.py` there: the 256 bytes,
the same at the end of a word, what each pair makes, start and end.
"""

import gzip
import tempfile
from functools import cache
from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.files import make_output_dir, read_json_object, write_json, write_text
from .network_files import CLIP_PADDING, END

START = "<|startoftext|>"
TOKENIZER_CONFIG, MENDS = "tokenizer_config.json", "ftfy"  # the key there of whether text is mended
_TRAINED = ("ppldm.json", "manifest.json")  # beside the folder of a tokenizer
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_LENGTH = 77
_holder = None  # of the folder, which goes when this process does


@cache
def vocabulary_folder(name: str) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer_config.json of a name in CLIP_PADDING, for this process."""
    global _holder
    _holder = _holder or tempfile.TemporaryDirectory(prefix="ppldm-clip-")
    folder = Path(_holder.name, name)
    make_output_dir(folder)
    text = gzip.decompress(_MERGES.read_bytes()).decode()
    write_text(folder / "merges.txt", text)
    write_json(folder / "vocab.json", {token: number for number, token in enumerate(tokens(text))})
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": CLIP_PADDING[name]}
    write_json(folder / "special_tokens_map.json", special)
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": _LENGTH, "do_lower_case": True, **special}
    write_json(folder / TOKENIZER_CONFIG, config)
    return folder


def mends_text(folder: Path) -> bool:
    """Whether the tokenizer in a folder mends text. Raises ConfigError."""
    path = folder / TOKENIZER_CONFIG
    said = read_json_object(path, ConfigError, inside=True).get(MENDS) if path.is_file() else None
    if said is None:
        return not any((folder.absolute().parent / name).is_file() for name in _TRAINED)
    if not isinstance(said, bool):
        raise ConfigError(f"{path}: {MENDS} {said!r:.80} is neither true nor false; copy the tokenizer again")
    return said


def write_mends(folder: Path, mends: bool) -> None:
    """Let the tokenizer_config.json in a folder say it."""
    path = folder / TOKENIZER_CONFIG
    write_json(path, {**(read_json_object(path, ConfigError) if path.is_file() else {}), MENDS: mends})


def tokens(merges: str) -> list[str]:
    """All tokens by their ids, of the text of a merges.txt."""
    order = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [*map(chr, order), *(chr(256 + number) for number in range(256 - len(order)))]
    pairs = ["".join(line.split()) for line in merges.splitlines() if not line.startswith("#version")]
    return [*letters, *(f"{letter}</w>" for letter in letters), *pairs, START, END]
