"""What CLIP's image encoder makes of pictures of any size."""

import paddle
from paddle import nn

from ...utils.pictures import bicubic_filter

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's pixels in 0 .. 1


@paddle.no_grad()
def embed_pictures(image_encoder: nn.Layer, pixels):
    """[B, 3, H, W] in 0 .. 255 to projected embeddings [B, D]."""
    return image_encoder(clip_pixels(pixels, image_encoder.config.image_size)).image_embeds


def clip_pixels(pixels, side: int):
    """[B, 3, H, W] in 0 .. 255 to float32 [B, 3, side, side], as CLIP takes it: the shorter side resized by a bicubic
    filter that does not alias, the middle of that, normalised."""
    height, width = pixels.shape[2:]
    shorter = min(height, width)
    with paddle.amp.auto_cast(enable=False):
        rows, columns = (_middle(old, side * old // shorter, side) for old in (height, width))
        mean, std = (paddle.to_tensor(one, "float32").reshape([3, 1, 1]) for one in (_MEAN, _STD))
        return (rows @ (pixels.astype("float32") / 255.0) @ columns.T - mean) / std


def _middle(old: int, new: int, side: int):
    """float32 [side, old]: the middle `side` of the `new` numbers that a line of `old` is resized to."""
    first = round((new - side) / 2)
    return paddle.to_tensor(bicubic_filter(old, new)[first : first + side])
