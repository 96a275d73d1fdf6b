"""The frozen networks that `ppldm precompute` encodes with. From the load on this process computes exactly. Each batch
has the full size, padded with black pictures or empty captions: what is computed of one depends on no other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ..config.network_files import published_network
from ..data.cached.key import EmbeddingsKey
from ..data.text.tokenizer import load_tokenizer
from ..networks.configs import (
    LABELS,
    TEXT_ENCODERS,
    check_tokenizer_fit,
    downscale_factor,
    hidden_width,
    is_effnet,
    is_pixels,
    is_sd3,
    is_sdxl,
    is_shifted,
    table_of,
)
from ..networks.engine import use_engine
from ..networks.model import encode_moments, hidden_states, join_caption, projected_caption
from ..utils.checksums import digest_of
from ..utils.errors import ConfigError, ModelError
from ..utils.files import read_json_object
from ..utils.log import get_logger, quiet_libraries
from ..utils.machine.devices import set_exactness
from ..weights.components import ComponentWeights, encoder_digest, text_encoder_digest
from ..weights.configs import CONFIG_FILES
from ..weights.fill import fill_component
from ..weights.model_file import TRANSFORMER, family_of, kind_of
from ..weights.source import open_model, read_component

_DENOISERS = {TRANSFORMER: is_sd3, "unet": is_sdxl}  # whether it is told of several text encoders, by its config


class PictureEncoder:
    """uint8 pixels, at most `batch_size` times [3, H, W], to float32 moments [n, 2, C, h, w]."""

    def __init__(self, vae, batch_size: int, digest: str = ""):
        self._vae, self.batch_size, self.digest = vae, batch_size, digest
        self.header = {"channels": vae.config.latent_channels, "factor": downscale_factor(vae.config)}
        self.measured = "scaling_factor" in vae.config and not is_shifted(vae.config)

    def __call__(self, pixels: Sequence[np.ndarray]) -> np.ndarray:
        batch = np.zeros((self.batch_size, *pixels[0].shape), np.uint8)
        np.stack(pixels, out=batch[: len(pixels)])
        return encode_moments(self._vae, paddle.to_tensor(batch)).numpy()[: len(pixels)]


class TextEncoder:
    """Captions, at most `batch_size`, to their last hidden states, float32 [n, L, D]: L is the key's
    `model_max_length`. With a projection [n, L + 1, D], as `join_caption` says. layer: the text encoder, or
    `networks.several_texts.CaptionEncoders`. key: without captions or part."""

    measured = False

    def __init__(self, layer, width: int, tokenizer, key: EmbeddingsKey, batch_size: int):
        self._layer, self._tokenizer, self.key = layer, tokenizer, key
        self.batch_size, self.digest, self.header = batch_size, key.digest, {"width": width}

    @paddle.no_grad()
    def __call__(self, captions: Sequence[str]) -> np.ndarray:
        ids = self._tokenizer.encode([*captions, *[""] * (self.batch_size - len(captions))])
        ids, end_id = paddle.to_tensor(ids), self._tokenizer.end_id
        if self.key.rows:
            made = self._layer.embed(ids)
        elif self.key.text_projection:
            made = join_caption(*projected_caption(self._layer, ids, end_id))
        else:
            made = hidden_states(self._layer, ids, end_id if self.key.mask_pad_tokens else None)
        return made.numpy()[: len(captions)]


def load_picture_encoder(request: Any) -> PictureEncoder:
    """request: a `LatentsRequest`. Raises ModelError, ConfigError."""
    quiet_libraries()
    set_exactness(fewer_bits=False, search_kernels=False)
    own = Path(request.model, CONFIG_FILES[0])
    kind = "effnet" if own.is_file() and is_effnet(read_json_object(own, ModelError, inside=True)) else "vae"
    found = read_component(kind, request.model, offline=request.offline)
    if is_pixels(found.config):
        raise ConfigError(f"{request.model} leaves pictures as they are: there is nothing to compute; omit --vae")
    layer, digest = fill_component(kind, found), encoder_digest(found)
    layer.eval()
    use_engine([layer if kind == "effnet" else layer.encoder], request.engine)
    get_logger().info("the %s of %s has the encoder %s", LABELS[kind], request.model, digest)
    return PictureEncoder(layer, request.batch_size, digest)


def load_text_encoder(request: Any) -> TextEncoder:
    """request: an `EmbeddingsRequest`. Raises ModelError, ConfigError."""
    quiet_libraries()
    set_exactness(fewer_bits=False, search_kernels=False)
    known = [name for name in _DENOISERS if published_network(name, str(request.model))]
    source = open_model(request.model, request.offline, (*TEXT_ENCODERS, *known) if known else ("text_encoder",))
    for name, several in _DENOISERS.items():
        if (denoiser := source.whole_config(name)) and several(denoiser):
            return _load_several(source, name, denoiser, request)
    kind = "projected_text_encoder" if request.text_projection else "text_encoder"
    found, own = source.component(kind), request.tokenizer or source.tokenizer
    if own is None:
        raise ConfigError(f"{source.path} has no tokenizer in or beside it; name its folder: --tokenizer")
    words = load_tokenizer(own, request.model_max_length, request.offline)
    check_tokenizer_fit(found.config, words.vocab_size, request.model_max_length)
    key = embeddings_key(found, words, request.mask_pad_tokens, request.dtype, request.text_projection)
    layer = fill_component(kind, found)
    layer.eval()
    get_logger().info("the text encoder of %s has the digest %s", request.model, key.text_encoder)
    return TextEncoder(layer, hidden_width(found.config), words, key, request.batch_size)


def _load_several(source, name: str, denoiser: dict, request: Any) -> TextEncoder:
    """Those of a whole Stable Diffusion 3 or XL, by its transformer or UNet, of that name."""
    from ..networks.several_texts import CaptionEncoders

    weights = source.read([name for name in TEXT_ENCODERS if name not in request.omitted_text_encoders])
    family, found = family_of({name: ComponentWeights(denoiser, {})}), weights.components
    words = family.read_tokenizer(request.tokenizer or weights.tokenizer, found, vars(request))
    layers = {name: fill_component(kind_of(family, name), one) for name, one in found.items()}
    for layer in layers.values():
        layer.eval()
    captions = CaptionEncoders(layers, denoiser, words)
    key = several_key(found, words, captions, request.dtype)
    get_logger().info(
        "the text encoders of %s (%s) have the digest %s", request.model, ", ".join(found), key.text_encoder
    )
    return TextEncoder(captions, captions.shape[1], words, key, request.batch_size)


def several_key(text_encoders: dict[str, ComponentWeights], tokenizer, captions, dtype: str) -> EmbeddingsKey:
    """Which embeddings are those of several text encoders, without captions or part. captions: the
    `networks.several_texts.CaptionEncoders` of them."""
    digests = [[name, text_encoder_digest(one)] for name, one in sorted(text_encoders.items())]
    return EmbeddingsKey(
        text_encoder=digest_of([digests, captions.facts]),
        tokenizer=tokenizer.digest,
        model_max_length=tokenizer.clip_length,
        mask_pad_tokens=False,
        dtype=dtype,
        rows=captions.shape[0],
    )


def embeddings_key(
    text_encoder: ComponentWeights, tokenizer, mask_pad_tokens: bool, dtype: str, text_projection: bool = False
) -> EmbeddingsKey:
    """Which embeddings are those of a text encoder, without captions or part. A mask does not matter to CLIP's. Raises
    ConfigError for a projection that is wider than the hidden states."""
    config = text_encoder.config
    if text_projection and config["projection_dim"] > config["hidden_size"]:
        raise ConfigError(
            f"embeddings of a text encoder of width {config['hidden_size']} with a projection of "
            f"{config['projection_dim']} cannot be cached; omit --text_embeddings"
        )
    return EmbeddingsKey(
        text_encoder=text_encoder_digest(text_encoder),
        tokenizer=tokenizer.digest,
        model_max_length=tokenizer.max_length,
        mask_pad_tokens=mask_pad_tokens and table_of("text_encoder", config) != "clip",
        dtype=dtype,
        text_projection=text_projection,
    )
