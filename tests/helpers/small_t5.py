"""A small T5 with random weights, and its tokenizer, which sentencepiece trains, in the folders of Hugging Face."""

import json
import random
from pathlib import Path

import numpy as np
import sentencepiece

from ppldm.config.network_files import CONFIG_DIR
from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config
from ppldm.weights.components import to_torch
from ppldm.weights.formats.files import write_safetensors

WORDS = "a red cat on the green mat picture of two small blue dogs über café 一只红色的猫 坐在 绿色的 垫子上 0 1 2"
CONFIG = json.loads((CONFIG_DIR / "t5_tiny.json").read_text())
WRITTEN = {"architectures": ["T5EncoderModel"], "model_type": "t5", "is_encoder_decoder": True, "is_gated_act": True,
           "dense_act_fn": "gelu_new", "n_positions": 512, "output_past": True, "decoder_start_token_id": 0,
           "tie_word_embeddings": False, "use_cache": True, "initializer_factor": 1.0, "num_decoder_layers": 2,
           "task_specific_params": {"summarization": {"prefix": "summarize: "}}}  # fmt: skip


def train_pieces(path: Path, **settings) -> Path:
    """A spiece.model with pieces of WORDS, T5's special tokens and at most 120 pieces."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS.split(), k=rng.randint(3, 12))) for _ in range(500)]
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    options = {"vocab_size": 120, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, **special | options | settings
        )
    return path


def t5_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Of the encoder by PyTorch's names, its words under one; no norm is at its initial value."""
    network = build_network("text_encoder", read_new_config("text_encoder", "t5_tiny", ""), seed)
    rng = np.random.default_rng(seed)
    arrays = to_torch({name: value.numpy() for name, value in network.state_dict().items()})
    del arrays["encoder.embed_tokens.weight"]
    norms = (name for name in arrays if "layer_norm" in name)
    return arrays | {name: rng.uniform(0.5, 1.5, arrays[name].shape).astype(np.float32) for name in norms}


def write_t5(folder: Path, seed: int = 0) -> Path:
    """text_encoder/ and tokenizer/ in `folder`; gives text_encoder/."""
    encoder = folder / "text_encoder"
    encoder.mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    train_pieces(folder / "tokenizer" / "spiece.model")
    (encoder / "config.json").write_text(json.dumps(WRITTEN | CONFIG))
    write_safetensors(encoder / "model.safetensors", t5_arrays(seed), "pt")
    return encoder
