"""CLIP (Radford et al. 2021, arXiv:2103.00020): embeddings of pictures and of texts in one space, each of length 1.

Read from a folder of transformers, PaddleNLP or ppdiffusers: config.json, the weights of both encoders and both
projections, and a tokenizer beside them or in tokenizer/. Texts are tokenized by ppldm's own tokenizer.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
from ppdiffusers.transformers import CLIPConfig, CLIPModel

from ...data.text.clip_tokenizer import ClipTokenizer
from ...networks.build import UNBUILDABLE
from ...networks.config_fields import settings_of
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ...weights.components import ComponentWeights
from ...weights.configs import complete_config
from ...weights.fill import fill_layer
from ...weights.formats.files import read_component_arrays, within_file
from ...weights.read import find_tokenizer
from .base import BATCH_SIZE, FeatureNetwork, layer_digest
from .resize import Convention


class ClipNetwork(FeatureNetwork):
    """Embeddings of pictures as any FeatureNetwork, and those of texts. `logit_scale`: what CLIP multiplies cosines
    with, 100 in the published models."""

    def __init__(self, model: CLIPModel, tokenizer: ClipTokenizer, convention: Convention):
        model.eval()
        self._model, self._tokenizer = model, tokenizer
        self.logit_scale = float(model.logit_scale.exp())
        side = model.config.vision_config.image_size
        super().__init__("clip", model.projection_dim, layer_digest(model), convention, side, self._embed_pictures)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings [N, dim] float32 of texts, cut at the length that the model takes."""
        embeddings = np.empty((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), BATCH_SIZE):
            batch = list(texts[start : start + BATCH_SIZE])
            ids = paddle.to_tensor(self._tokenizer.encode(batch))
            with paddle.no_grad():
                embeddings[start : start + len(batch)] = _unit(self._model.get_text_features(ids))
        return embeddings

    def _embed_pictures(self, batch: np.ndarray) -> np.ndarray:
        with paddle.no_grad():
            return _unit(self._model.get_image_features(paddle.to_tensor(batch)))


def load(path: Path, convention: Convention) -> ClipNetwork:
    """The CLIP in a folder. Raises ModelError, ConfigError."""
    folder = find_tokenizer(path)
    if folder is None:
        raise ModelError(f"{path} has no tokenizer (vocab.json, merges.txt), which CLIP needs; give its whole folder")
    arrays = {name: array for name, array in read_component_arrays(path).items() if not name.endswith("position_ids")}
    component = ComponentWeights(read_json_object(path / "config.json", ModelError, inside=True), arrays, str(path))
    if "logit_scale" in arrays:
        arrays["logit_scale"] = arrays["logit_scale"].reshape(())  # of one value, in files of older versions
    with within_file(component):
        model = _build(component.config, path)
    fill_layer(model, arrays, path, "its config")
    return ClipNetwork(model, ClipTokenizer(folder, model.config.text_config.max_position_embeddings), convention)


def _build(config: dict, path: Path) -> CLIPModel:
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ModelError(f"{path / 'config.json'} is not the config of a CLIP with both encoders; give such a folder")
    known = {name: vision[name] for name in settings_of("image_encoder") if name in vision and name != "projection_dim"}
    try:
        return CLIPModel(
            CLIPConfig(
                text_config=complete_config("text_encoder", {"model_type": "clip_text_model", **text}, path),
                vision_config=known,
                projection_dim=config.get("projection_dim", 512),
            )
        )
    except UNBUILDABLE as error:
        raise ModelError(
            f"{path}: the config makes no CLIP ({type(error).__name__}: {error}); copy it again"
        ) from error


def _unit(embeddings: paddle.Tensor) -> np.ndarray:
    return (embeddings / embeddings.norm(p=2, axis=-1, keepdim=True)).numpy()
