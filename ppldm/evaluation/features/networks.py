"""The feature networks, each read from the files in which it is published.

InceptionV3 as FID has it: TensorFlow's network of 2015 with its weights, 2048 features of the last average pool.

It differs from the published architecture (Szegedy et al. 2015, arXiv:1512.00567), which paddle.vision has: averages
leave out the padding, the last block's pool is a maximum, batch norm has an epsilon of 0.001, and 1008 classes. Weights
are read under the names of pytorch-fid and torch-fidelity, of PaddleGAN (other statistics of batch norm), and of
paddle.vision, which PaddleNLP's file has.

DINOv2 (`networks.dinov2`): its class token.

CLIP (Radford et al. 2021, arXiv:2103.00020): embeddings of pictures and of texts in one space, each of length 1.

Read from a folder of transformers, PaddleNLP or ppdiffusers: config.json, the weights of both encoders and both
projections, and a tokenizer beside them or in tokenizer/. Texts are tokenized by ppldm's own tokenizer.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.vision.models import InceptionV3

from ...data.text.tokenizer import ClipTokenizer
from ...networks.build import UNBUILDABLE, init_network, uninitialized
from ...networks.config_fields import settings_of
from ...networks.cpu_operators.layers import use_cpu_operators
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ...utils.log import get_logger
from ...weights.components import ComponentWeights
from ...weights.configs import complete_config
from ...weights.fetch import RANDOM
from ...weights.fill import fill_layer
from ...weights.formats.files import read_component_arrays, within_file
from ...weights.losses import load_dinov2 as read_dinov2
from ...weights.losses import load_lpips
from ...weights.source import open_model
from .base import BATCH_SIZE, Convention, FeatureNetwork, layer_digest, network_of

_INCEPTION_SIDE, DIM, CLASSES = 299, 2048, 1008
_BLOCKS = ["5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"]
_INCEPTION_NAMES = (
    ("Conv2d_", "inception_stem.conv_"),
    *((f"Mixed_{block}.", f"inception_block_list.{number}.") for number, block in enumerate(_BLOCKS)),
    (".branch_pool.", ".branch_pool_conv."),
    (".conv.", ".0."),
    (".bn.", ".1."),
    (".running_mean", "._mean"),
    (".running_var", "._variance"),
)
_UNUSED = ("fc.", "AuxLogits.")  # the classifiers
_DINOV2_SIDE = 224


@uninitialized()
def load_inception(path: Path, convention: Convention) -> FeatureNetwork:
    """FID's InceptionV3 with the weights at `path`, or random ones. Raises ModelError."""
    layer = build_inception()
    if str(path) == RANDOM:
        get_logger().warning("InceptionV3 has random weights: distances compare with no published ones")
        init_network(layer, "inception", seed=0)
    else:
        fill_layer(layer, rename_inception(read_component_arrays(path), path), path, "FID's InceptionV3")
    return network_of("inception", layer, DIM, convention, _INCEPTION_SIDE)


def build_inception() -> InceptionV3:
    """FID's variant of paddle.vision's network, up to the last average pool."""
    network = InceptionV3(num_classes=0)
    for layer in network.sublayers():
        if isinstance(layer, nn.BatchNorm2D):
            layer._epsilon = 0.001
        elif isinstance(layer, nn.AvgPool2D):
            layer.exclusive = True
    network.inception_block_list[-1].branch_pool = nn.MaxPool2D(kernel_size=3, stride=1, padding=1)
    return network


def rename_inception(arrays: dict[str, np.ndarray], source) -> dict[str, np.ndarray]:
    """The weights under paddle.vision's names, without classifiers. Raises ModelError for ImageNet's 1000 classes."""
    classes = arrays.get("fc.bias", np.empty(CLASSES)).shape[0]
    if classes != CLASSES:
        raise ModelError(
            f"{source} holds an InceptionV3 of {classes} classes, and FID's has {CLASSES}; give TensorFlow's of 2015"
        )
    renamed = {}
    for name, array in arrays.items():
        if not name.startswith(_UNUSED) and not name.endswith("num_batches_tracked"):
            for theirs, ours in _INCEPTION_NAMES:
                name = name.replace(theirs, ours)
            renamed[name] = array
    return renamed


def load_dinov2(path: Path, convention: Convention) -> FeatureNetwork:
    layer = read_dinov2(path)
    return network_of("dinov2", layer, layer.config["width"], convention, _DINOV2_SIDE)


class ClipNetwork(FeatureNetwork):
    """Embeddings of pictures, and of texts. `logit_scale`: what CLIP multiplies cosines with, 100 as published."""

    def __init__(self, model, tokenizer: ClipTokenizer, convention: Convention):
        use_cpu_operators(model).eval()
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


def load_clip(path: Path, convention: Convention) -> ClipNetwork:
    """The CLIP in a folder. Raises ModelError, ConfigError."""
    folder = open_model(path).tokenizer
    if folder is None:
        raise ModelError(f"{path} has no tokenizer (vocab.json, merges.txt), which CLIP needs; give its whole folder")
    arrays = {name: array for name, array in read_component_arrays(path).items() if not name.endswith("position_ids")}
    component = ComponentWeights(read_json_object(path / "config.json", ModelError, inside=True), arrays, str(path))
    if "logit_scale" in arrays:
        arrays["logit_scale"] = arrays["logit_scale"].reshape(())  # of one value, in files of older versions
    with within_file(component):
        model = _build_clip(component.config, path)
    fill_layer(model, arrays, path, "its config")
    return ClipNetwork(model, ClipTokenizer(folder, model.config.text_config.max_position_embeddings), convention)


@uninitialized()
def _build_clip(config: dict, path: Path):
    from ppdiffusers.transformers import CLIPConfig, CLIPModel

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


class PairNetwork:
    """LPIPS on VGG16: distances of pairs of pictures of one size, uint8 [H, W, 3]. `digest`: as `FeatureNetwork`'s."""

    def __init__(self, layer, convention: Convention):
        self.digest, self.convention = layer_digest(layer), f"{convention.name}: {convention.words}"
        self._layer, self._prepare = layer, convention.prepare

    @paddle.no_grad()
    def distances(self, generated: Sequence[np.ndarray], real: Sequence[np.ndarray]) -> np.ndarray:
        """[N] float64."""
        found = []
        for start in range(0, len(real), BATCH_SIZE):
            numbers = range(start, min(start + BATCH_SIZE, len(real)))
            sides = (np.stack([self._prepare(pictures[i], 0) for i in numbers]) for pictures in (generated, real))
            found.append(self._layer(*map(paddle.to_tensor, sides)).numpy())
        return np.concatenate(found).astype(np.float64)


def load_pairs(path: Path, convention: Convention) -> PairNetwork:
    return PairNetwork(load_lpips(path), convention)


# By the names of `base.NETWORKS`.
LOADERS = {"inception": load_inception, "dinov2": load_dinov2, "clip": load_clip, "lpips": load_pairs}
