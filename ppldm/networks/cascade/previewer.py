"""Stable Cascade's previewer, which makes small pictures of stage C's latents, to look at while it trains.

    latents [B, 16, h, w] -> 1x1, 3x3, (twice as large, 3x3) three times, 1x1 -> colours [B, 3, 8 h, 8 w], 0 .. 1

Between two of these layers are GELU and a batch norm. Reference: modules/previewer.py of Stability-AI/StableCascade.
"""

import paddle
from paddle import nn

from ...utils.errors import ModelError

_COUNT = "num_batches_tracked"  # of batches, which nothing here asks for
_NAMES = {"running_mean": "_mean", "running_var": "_variance"}  # of PyTorch's batch norms, in Paddle


class Previewer(nn.Layer):
    """hidden: channels of its first layers; the published one has 512."""

    def __init__(self, latent_channels: int, hidden: int):
        super().__init__()
        widths = (hidden, hidden // 2, hidden // 4, hidden // 4)
        layers: list = [nn.Conv2D(latent_channels, hidden, 1), nn.Conv2D(hidden, hidden, 3, padding=1)]
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2DTranspose(before, after, 2, 2), nn.Conv2D(after, after, 3, padding=1)]
        counts = (hidden, hidden, *(width for width in widths[1:] for _ in range(2)))
        steps = [(layer, nn.GELU(), nn.BatchNorm2D(count)) for layer, count in zip(layers, counts, strict=True)]
        self.blocks = nn.Sequential(*(one for step in steps for one in step), nn.Conv2D(widths[-1], 3, 1))

    def forward(self, latents):
        return self.blocks(latents)


def load_previewer(read: dict, latent_channels: int, path: str) -> Previewer:
    """That of the arrays of a published file, which have PyTorch's names and layout, for latents of so many channels.
    Raises ModelError."""
    places = ((name.rpartition("."), array) for name, array in read.items())
    arrays = {f"{place}.{_NAMES.get(leaf, leaf)}": array for (place, _, leaf), array in places if leaf != _COUNT}
    first = arrays.get("blocks.0.weight")
    with paddle.utils.unique_name.guard("previewer_"):  # the names of what is trained stay as they are
        made = Previewer(latent_channels, len(first) if first is not None else 512)
    own = {name: tuple(one.shape) for name, one in made.state_dict().items()}
    if wrong := sorted({*own.items()} ^ {(name, array.shape) for name, array in arrays.items()}):
        text = f"{path} is not a previewer of latents of {latent_channels} channels ({wrong[0][0]} differs)"
        raise ModelError(f"{text}; give Stable Cascade's previewer.safetensors, or omit --previewer_name_or_path")
    made.set_state_dict(arrays)
    made.eval()
    return made
