"""Low-rank changes of weights (LoRA: Hu et al. 2021, arXiv:2106.09685): W + alpha / r * up @ down, as plain arrays.

Arrays have PyTorch's orientation, as the files of diffusers and kohya do; Paddle's linear layers hold them transposed.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ..components import cast


@dataclass(frozen=True)
class LoraPair:
    """The change of one layer's weight. Of a linear layer: down [r, in], up [out, r]; of a convolution: down
    [r, in, kh, kw], up [out, r, 1, 1]. alpha: the change is scaled by alpha / r."""

    down: np.ndarray
    up: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        """r, of at least 1."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: (out, in) or (out, in, kh, kw)."""
        return len(self.up), *self.down.shape[1:]

    @property
    def change(self) -> np.ndarray:
        """What is added to the weight, float32 of its shape."""
        down, up = (array.reshape(len(array), -1).astype(np.float32) for array in (self.down, self.up))
        return (self.alpha / self.rank * (up @ down)).reshape(self.shape)

    @property
    def squared_norm(self) -> float:
        """The sum of the squares of the change, without making it: the trace of (up' up) (down down')."""
        down, up = (array.reshape(len(array), -1).astype(np.float64) for array in (self.down, self.up))
        return (self.alpha / self.rank) ** 2 * float(np.sum((up.T @ up) * (down @ down.T)))


@dataclass(frozen=True)
class Lora:
    """Pairs by component ("unet", "text_encoder") and by layer ("down_blocks.0.attentions.0.to_q" as diffusers names
    it; "….to_out.0"). metadata: what is known of how they were trained."""

    components: dict[str, dict[str, LoraPair]]
    metadata: dict = field(default_factory=dict)
    source: str = "the LoRA"  # where it came from, for messages

    def cast(self, dtype: str) -> "Lora":
        """The same with arrays of that dtype."""
        components = {
            component: {
                layer: replace(pair, **cast({"down": pair.down, "up": pair.up}, dtype))
                for layer, pair in layers.items()
            }
            for component, layers in self.components.items()
        }
        return replace(self, components=components)
