"""What an autoencoder makes of the real pictures, as a set that is compared with them, pair by pair or as a whole."""

import json
from pathlib import Path

import numpy as np
import paddle

from ..diffusion.guided import to_pictures
from ..inference.pictures.draw import SETTINGS_CHUNK, read_settings
from ..networks.autoencoder import reconstruct
from ..utils.checksums import checksum_arrays
from ..utils.files import make_output_dir
from ..utils.log import progress
from ..utils.pictures import save_png
from ..utils.processes.world import World, shard
from ..weights.fill import fill_component, find_component_by_name
from .pictures import WEIGHTS, PictureSet


class Reconstructor:
    """The VAE in a folder, with the posterior's mean as latents."""

    def __init__(self, path: Path, offline: bool):
        found = find_component_by_name("vae", path, offline=offline)
        self.fingerprint = checksum_arrays(found.arrays.items())
        self.resolution = found.config["sample_size"]
        self._vae = fill_component("vae", found)
        self._vae.eval()

    def write(self, real: PictureSet, folder: Path, batch_size: int, world: World) -> None:
        """This rank's share of the pictures that are not there yet, in the order of `real`, each with what it is made
        of. Batches are those of all pictures, so that the bits do not depend on what is there."""
        make_output_dir(folder)
        digits = len(str(len(real) - 1))
        files = [folder / f"{number:0{digits}d}.png" for number in range(len(real))]
        records = [
            {"prompt": caption or "", "reconstruction_of": one, WEIGHTS: self.fingerprint}
            for one, caption in zip(real.ids, real.captions, strict=True)
        ]
        batches = [range(start, min(start + batch_size, len(real))) for start in range(0, len(real), batch_size)]
        with progress(total=len(real), desc="reconstructing", unit="picture") as bar:
            for batch in (batches[number] for number in shard(len(batches), world)):
                bar.update(len(batch))
                todo = [number for number in batch if read_settings(files[number]) != records[number]]
                if todo:
                    pixels = np.stack([real[number] for number in batch]).transpose(0, 3, 1, 2)
                    made = to_pictures(reconstruct(self._vae, paddle.to_tensor(np.ascontiguousarray(pixels))))
                    for number in todo:
                        save_png(files[number], made[number - batch[0]], {SETTINGS_CHUNK: json.dumps(records[number])})
