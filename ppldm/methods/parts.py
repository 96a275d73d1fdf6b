"""What methods need of a network: the output of one of its layers, and a projector that is trained with it."""

import paddle
from paddle import nn

from ..networks.build import init_like_pytorch

_SALT = 40  # of initial weights: `networks.build` has smaller ones


def keep_output(layer: nn.Layer, taps: dict, name: str) -> None:
    """From now on `taps[name]` is what the layer gave last."""
    layer.register_forward_post_hook(lambda _, given, made: taps.__setitem__(name, made))


def width_of(transformer: nn.Layer) -> int:
    """Numbers of a token."""
    config = transformer.config
    return config["dim"] if "dim" in config else config["num_attention_heads"] * config["attention_head_dim"]


def blocks_of(network: nn.Layer) -> list:
    """The blocks of a transformer in their order."""
    if hasattr(network, "in_blocks"):  # a UViT
        return [*network.in_blocks, network.mid_block, *network.out_blocks]
    return list(network.transformer_blocks if hasattr(network, "transformer_blocks") else network.blocks)


def extras_of(network: nn.Layer) -> int:
    """How many tokens stand before the patches, of what it computes now."""
    return getattr(network, "extras", 0)


class Projector(nn.Sequential):
    """Hidden states [B, width, h, w] to features [B, features, h, w]: one convolution of 3 x 3."""

    def __init__(self, width: int, features: int):
        super().__init__(nn.Conv2D(width, features, 3, padding=1))
        self.config = {"width": width, "features": features}


def make_projector(width: int, features: int, seed: int) -> Projector:
    """A new one, with weights as PyTorch draws them."""
    with paddle.utils.unique_name.guard("projector_"):
        return init_like_pytorch(Projector(width, features), seed, _SALT)
