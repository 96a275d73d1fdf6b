"""A small data set of pictures of several shapes."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row

_SIZES = [(36, 32), (60, 40), (40, 60), (33, 50), (70, 34)]  # width, height


def write_shaped(folder: Path) -> dict[str, Path]:
    """Filelists "train" of 40 rows and "held-out" of 12: of very different shares, in parts beside them."""
    rng, found = np.random.default_rng(0), {}
    for name, count in (("train", 40), ("held-out", 12)):
        rows = []
        for number in range(count):
            width, height = _SIZES[rng.choice(5, p=[0.5, 0.2, 0.1, 0.1, 0.1])]
            picture = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((width, height))
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            rows.append(Row(f"picture {number}", buffer.getvalue(), {"width": width, "height": height}))
        write_part(folder / f"{name}.gz", rows)
        write_filelist(folder / f"{name}.filelist", [f"{name}.gz"])
        found[name] = folder / f"{name}.filelist"
    return found
