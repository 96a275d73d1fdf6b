"""A first training on a folder of pictures, with the tiny networks of a CPU: what fits what is there, as recipes.

`ppldm quickstart --pictures` runs it, `ppldm init` writes it down.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.load import file_layers, last_value, preset_path
from ..config.recipe import preset_recipe
from ..data.text.survey import Survey, spread
from ..data.text.vocabulary import length_of
from ..utils.errors import ConfigError, DataError, ModelError, RowError
from ..utils.stages import seconds_per_update
from ..utils.variables import taken_back
from ..weights.fetch import check_name
from .base import get_family

_PRESETS = {"autoencoder": "autoencoder-tiny-cpu", "ldm": "ldm-tiny-cpu"}
_BATCHES = {"autoencoder": 4, "ldm": 16}
_FROM_NOTHING, _FROM_PACKAGE = 2000, 800  # updates of the autoencoder
_POWERS = {"autoencoder": 1.6, "ldm": 1.3}  # of the side, with which the seconds of an update grow from 48 pixels
_STEP = 16  # pixels, of the sides that these networks take
_GOOD_PSNR = 24.0  # dB; with less, an autoencoder blurs what its pictures show
_NUM_MEASURED = 16  # pictures
_NUM_PROMPTS, _NUM_SAMPLES = 6, 4  # what is drawn while it trains, and how often


@dataclass(frozen=True)
class FirstTraining:
    """What is trained. steps: updates of the text-to-image model. autoencoder: the package's, None where it has none;
    psnr: of what that makes of these pictures, in dB."""

    found: Survey
    steps: int
    autoencoder_steps: int
    resolution: int
    autoencoder: str | None
    psnr: float
    trains_autoencoder: bool

    @classmethod
    def choose(
        cls,
        found: Survey,
        steps: int | None = None,
        autoencoder_steps: int | None = None,
        resolution: int | None = None,
        train_autoencoder: bool = False,
        known: dict | None = None,
    ) -> "FirstTraining":
        """None: by what was found. `known`: an earlier `quality`. Raises ConfigError, DataError, ModelError."""
        resolution = resolution or found.resolution
        if resolution % _STEP:
            raise ConfigError(f"--resolution {resolution}: the tiny networks take multiples of {_STEP}; round it")
        if not found.count_rows(resolution):
            raise DataError(f"no picture of {found.folder} has sides of {resolution} pixels; lower --resolution")
        package = str(last_value(file_layers(preset_path(_PRESETS["ldm"])), "model.vae_name_or_path"))
        own = cls(found, steps or found.num_updates, autoencoder_steps or _FROM_NOTHING, resolution, None, 0.0, True)
        try:
            check_name(package)
        except ModelError:
            return own
        own = replace(own, autoencoder=package, autoencoder_steps=autoencoder_steps or _FROM_PACKAGE)
        is_known = known and {**known, "psnr": 0.0} == own.quality
        with taken_back():
            psnr = known["psnr"] if is_known else measure(package, [*found.captions], resolution)
        return replace(own, psnr=psnr, trains_autoencoder=train_autoencoder or psnr < _GOOD_PSNR)

    @property
    def quality(self) -> dict:
        """To be remembered."""
        return {"autoencoder": self.autoencoder, "resolution": self.resolution, "psnr": self.psnr}

    def sample_every(self, family: str) -> int:
        """Updates of a training from one sheet of samples to the next."""
        return max(1, (self.autoencoder_steps if family == "autoencoder" else self.steps) // _NUM_SAMPLES)

    def batch(self, family: str) -> int:
        """Samples of an update: a power of 2, no more than there are pictures."""
        return min(_BATCHES[family], 1 << (max(1, self.found.count_rows(self.resolution)).bit_length() - 1))

    def seconds(self, family: str) -> float:
        """That the training of a family takes on two usual cores."""
        steps = self.steps if family == "ldm" else self.autoencoder_steps
        larger = max(1.0, self.resolution / 48) ** _POWERS[family]
        return 20 + seconds_per_update(_PRESETS[family]) * steps * larger

    def prompts(self) -> list[str]:
        """Some of the captions."""
        return self.found.prompts(_NUM_PROMPTS)

    def describe(self) -> list[str]:
        """Lines for people."""
        lines = self.found.describe()
        if self.autoencoder:
            how = "too blurred" if self.psnr < _GOOD_PSNR else "well enough"
            used = "is trained on them first" if self.trains_autoencoder else "is used as it is"
            lines.append(f"the package's autoencoder gives them back {how} (PSNR {self.psnr:.1f} dB): it {used}")
        if small := sum(0 < side < self.resolution for side in self.found.sides.values()):
            lines.append(f"{small} of {len(self.found.sides)} pictures looked at have a side under {self.resolution} "
                         "pixels, and are left out")  # fmt: skip
        trained = f"{self.autoencoder_steps} updates of the autoencoder and " * self.trains_autoencoder
        size = f"{self.resolution} x {self.resolution} pixels (squares: what is wider or higher is cut)"
        return [*lines, f"{size}, {trained}{self.steps} updates of the text-to-image model"]

    def autoencoder_recipe(self, head: str, file_list: str, output_dir: str) -> str:
        """The YAML of the autoencoder's training; `head`: the beginning of its comment."""
        begun = {"model.vae_name_or_path": self.autoencoder} if self.autoencoder else {}
        changes = {"data.file_list": file_list, "run.output_dir": output_dir, "run.max_steps": self.autoencoder_steps}
        return self._recipe("autoencoder", head, begun | changes)

    def diffusion_recipe(
        self, head: str, file_list: str, output_dir: str, tokenizer: str, vae: str | None, prompts: Sequence[str]
    ) -> str:
        """The YAML of the text-to-image model's training; vae: the one that was trained before, None: the package's."""
        return self._recipe("ldm", head, {
            "data.file_list": file_list,
            "run.output_dir": output_dir,
            "run.max_steps": self.steps,
            "model.tokenizer_name": tokenizer,
            "model.model_max_length": length_of(self.found.captions.values()),
            "model.vae_name_or_path": vae or self.autoencoder,
            "logging.logging_steps": max(1, min(20, self.steps // 10)),
            "validation.validation_prompts": list(prompts),
        })  # fmt: skip

    def _recipe(self, family: str, head: str, changes: dict) -> str:
        minutes = f"On two cores it takes about {max(1, round(self.seconds(family) / 60))} minutes."
        changes |= {"data.resolution": self.resolution, "run.per_device_train_batch_size": self.batch(family)}
        changes["validation.image_logging_steps"] = self.sample_every(family)
        shown = ("optimizer.learning_rate", "run.save_steps", "run.seed")
        return f"{head}# {minutes}\n" + preset_recipe(_PRESETS[family], get_family(family).Config, changes, shown)


def measure(autoencoder: str, pictures: list[Path], resolution: int) -> float:
    """PSNR, in dB, of what an autoencoder makes of the centres of some pictures. Raises DataError, ModelError."""
    import numpy as np
    from PIL import ImageOps

    from ..utils.log import quiet_libraries
    from ..utils.machine.cpu import load_paddle

    load_paddle()
    quiet_libraries()
    import paddle

    from ..data.images import decode_image
    from ..networks.autoencoder import psnr, reconstruct
    from ..weights.fill import load_vae

    centres = []
    for path in spread(pictures, _NUM_MEASURED):
        with suppress(RowError, OSError):  # the conversion, or the training, counts it with its reason
            picture = ImageOps.fit(decode_image(path.read_bytes()), (resolution, resolution))
            centres.append(np.asarray(picture).transpose(2, 0, 1))
    if not centres:
        raise DataError("none of the pictures can be decoded; save them again as JPEG or PNG")
    pixels, vae = paddle.to_tensor(np.stack(centres)), load_vae(autoencoder)
    vae.eval()
    return psnr(pixels, reconstruct(vae, pixels))
