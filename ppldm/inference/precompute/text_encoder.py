"""A frozen text encoder as what `ppldm precompute` encodes captions with."""

import numpy as np
import paddle

from ...data.cached.embeddings import EmbeddingsRule
from ...data.text.tokenizer import load_tokenizer
from ...networks.configs import check_tokenizer_fit, hidden_width, is_ldmbert
from ...networks.encoders import hidden_states, join_caption, projected_caption
from ...utils.errors import ConfigError
from ...utils.log import get_logger, quiet_libraries
from ...utils.machine.devices import set_exactness
from ...weights.components import ComponentWeights, text_encoder_digest
from ...weights.fetch import locate_model
from ...weights.fill import fill_component
from ...weights.folders import COMPONENT_FOLDERS
from ...weights.read import find_tokenizer, read_component


class TextEncoder:
    """Captions, at most `batch_size`, to their last hidden states, float32 [n, L, D]: L is the rule's
    `model_max_length`, D is `width`. With a projection [n, L + 1, D], as `join_caption` says.

    Each batch has the full size, with empty captions behind, so that what is computed of a caption does not depend on
    how many others there are.
    """

    def __init__(self, layer, width: int, tokenizer, rule: EmbeddingsRule, batch_size: int):
        self._layer, self._tokenizer = layer, tokenizer
        self.width, self.rule, self.batch_size, self.digest = width, rule, batch_size, rule.digest

    @paddle.no_grad()
    def __call__(self, captions: list[str]) -> np.ndarray:
        ids = self._tokenizer.encode([*captions, *[""] * (self.batch_size - len(captions))])
        ids, end_id = paddle.to_tensor(ids), self._tokenizer.end_id
        if self.rule.text_projection:
            made = join_caption(*projected_caption(self._layer, ids, end_id))
        else:
            made = hidden_states(self._layer, ids, end_id if self.rule.mask_pad_tokens else None)
        return made.numpy()[: len(captions)]


def load_text_encoder(
    name_or_path: str,
    tokenizer: str | None,
    max_length: int,
    mask_pad_tokens: bool,
    dtype: str,
    batch_size: int,
    offline: bool,
    text_projection: bool = False,
) -> TextEncoder:
    """Of the text encoder in a folder or of a name, by default with the tokenizer in or beside it; from here on this
    process computes exactly. text_projection: with its projection. Raises ModelError, ConfigError."""
    quiet_libraries()
    set_exactness(fewer_bits=False, search_kernels=False)
    path = locate_model(name_or_path, {"text_encoder": COMPONENT_FOLDERS["text_encoder"]}, offline)
    kind = "projected_text_encoder" if text_projection else "text_encoder"
    found, own = read_component(kind, path), tokenizer or find_tokenizer(path)
    if own is None:
        raise ConfigError(f"{path} has no tokenizer in or beside it; name its folder: --tokenizer")
    words = load_tokenizer(own, max_length, offline)
    check_tokenizer_fit(found.config, words.vocab_size, max_length)
    rule = make_rule(found, words, mask_pad_tokens, dtype, text_projection)
    layer = fill_component(kind, found)
    layer.eval()
    get_logger().info("the text encoder of %s has the digest %s", name_or_path, rule.text_encoder)
    return TextEncoder(layer, hidden_width(found.config), words, rule, batch_size)


def make_rule(
    text_encoder: ComponentWeights, tokenizer, mask_pad_tokens: bool, dtype: str, text_projection: bool = False
) -> EmbeddingsRule:
    """Which embeddings are those of a text encoder. A mask does not matter to CLIP's. Raises ConfigError for a
    projection that is wider than the hidden states."""
    config = text_encoder.config
    if text_projection and config["projection_dim"] > config["hidden_size"]:
        raise ConfigError(
            f"embeddings of a text encoder of width {config['hidden_size']} with a projection of "
            f"{config['projection_dim']} cannot be cached; omit --text_embeddings"
        )
    masked = mask_pad_tokens and not text_projection and is_ldmbert(config)
    digest = text_encoder_digest(text_encoder)
    return EmbeddingsRule(
        digest, tokenizer.digest, tokenizer.max_length, masked, dtype, text_projection=text_projection
    )
