"""Pictures with structure, for what looks at them."""

import io

import numpy as np
from PIL import Image


def draw(seed: int, width: int = 120, height: int = 90) -> Image.Image:
    """A smooth picture in colour."""
    rng = np.random.default_rng(seed)
    layers = [(rng.normal(size=(cells, cells, 3)), 40 * 0.6**i) for i, cells in enumerate((4, 8, 16))]
    shown = sum(
        strength
        * np.stack(
            [
                np.asarray(Image.fromarray(layer[:, :, c].astype(np.float32)).resize((width, height), Image.BICUBIC))
                for c in range(3)
            ],
            axis=2,
        )
        for layer, strength in layers
    )
    return Image.fromarray((shown + 120).clip(0, 255).astype(np.uint8))


def encode(picture: Image.Image, format: str = "PNG", **how) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **how)
    return file.getvalue()
