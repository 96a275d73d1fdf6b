"""A family in one file: pictures of 8 x 8 pixels are denoised at any level of a continuous noise schedule.

It stands in for families to come: nothing outside this file knows it.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ppldm.config.option import Bounds, option
from ppldm.data.inputs import Normals, Pixels, Uniform
from ppldm.families import base
from ppldm.families.base import Family
from ppldm.utils.errors import ConfigError
from ppldm.utils.rng import Stream

FACTOR = 2  # the network halves the sides once


@dataclass(kw_only=True)
class ToyConfig:
    """What is trained."""

    family: ClassVar[str] = "toy"
    width: int = option(4, "Channels inside.", section="model", bounds=Bounds(above=0), identity=True)

    def check(self) -> None:
        """Every combination works."""


@dataclass(frozen=True)
class Cosine:
    """alpha = cos(pi/2 u), sigma = sin(pi/2 u) at level u in [0, 1): log-SNR = -2 ln tan(pi/2 u), Nichol and Dhariwal
    2021 (arXiv:2102.09672)."""

    def settings(self) -> dict:
        """For model.json."""
        return {"noise_schedule": "cosine", "prediction_type": "epsilon"}


class Toy(Family):
    """Learns the noise; keeps an average."""

    name = "toy"
    plural = "toys"
    Config = ToyConfig
    components: ClassVar = {"net": "ToyNet"}
    needs_process = True
    unsupported = ("fp16", "recompute", "to_static")

    def check(self, config, data) -> None:
        """The sides divide."""
        if data.resolution % FACTOR:
            raise ConfigError(f"--resolution {data.resolution} must be a multiple of {FACTOR}")

    def average(self, config):
        """Always."""
        from ppldm.methods.averages.ema import GradualDecay

        return GradualDecay(0.9)

    def build(self, config, data, seed: int):
        """Anew."""
        model = _model(config.width, seed)
        pixels = Normals(Stream.NOISE, 3)
        model.inputs = {"pictures": Pixels(), "level": Uniform(Stream.TIMESTEP), "noise": pixels}
        return model

    def export(self, model, config, dataset, folder: Path, average, metadata: dict) -> None:
        """Averaged weights beside model.json."""
        import paddle

        from ppldm.utils.files import atomic_dir
        from ppldm.weights.fill import describe_model

        with atomic_dir(folder) as target, average.applied():
            describe_model(self, model).write(target)
            paddle.save(model.net.state_dict(), str(target / "net.pdparams"))

    def read(self, folder: Path) -> dict:
        """The exported weights by name, in a network that model.json alone describes."""
        import paddle

        from ppldm.weights.model_file import read_model_file

        model = _model(read_model_file(folder).components["net"].config["width"], seed=1)
        model.net.set_state_dict(paddle.load(str(folder / "net.pdparams")))
        return {name: value.numpy() for name, value in model.state_dict().items()}


def _model(width: int, seed: int):
    import math

    import numpy as np
    import paddle
    from paddle import nn

    from ppldm.networks.model import Component, Loss, Model
    from ppldm.utils.rng import make_rng

    class ToyNet(nn.Layer):
        def __init__(self):
            super().__init__()
            self.config = {"width": width}
            self.down = nn.Conv2D(4, width, FACTOR, FACTOR)
            self.up = nn.Conv2DTranspose(width, 3, FACTOR, FACTOR)

        def forward(self, pictures, level):
            plane = level.expand([-1, 1, *pictures.shape[2:]])
            return self.up(nn.functional.silu(self.down(paddle.concat([pictures, plane], axis=1))))

    class ToyModel(Model):
        process = Cosine()

        def __init__(self):
            super().__init__()
            self.net = ToyNet()

        @property
        def networks(self) -> dict[str, Component]:
            return {"net": Component(self.net, trained=True)}

        def forward(self, pictures, level, noise) -> Loss:
            angle = (level * (math.pi / 2)).reshape([-1, 1, 1, 1])
            noisy = angle.cos() * (pictures.astype("float32") / 127.5 - 1.0) + angle.sin() * noise
            errors = (self.net(noisy, level.reshape([-1, 1, 1, 1])) - noise).square().mean([1, 2, 3])
            return Loss(errors.mean(), errors.detach(), level)

    with paddle.utils.unique_name.guard():
        model = ToyModel()
    rng = make_rng(seed, Stream.INIT)
    for parameter in model.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(0.1))
    return model


FAMILY = Toy()


@contextmanager
def registered_toy():
    """Inside the block the family is one like the others."""
    base.register(FAMILY)
    yield
    del base._REGISTERED[FAMILY.name]
