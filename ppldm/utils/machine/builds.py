"""Which build of Paddle a machine needs.

The builds are those that Paddle's own package index has for 3.3 on Linux (its installation page lists them); PyPI's
newest paddlepaddle-gpu is 2.6. A build brings the CUDA libraries with it, so that only the driver and the cards decide.
Run before anything is installed, `choose_build` needs nothing but Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .nvidia_smi import Gpu

INDEX = "https://www.paddlepaddle.org.cn/packages/stable/"  # of Paddle's packages, with a folder for each build


@dataclass(frozen=True)
class Build:
    """A build of paddlepaddle-gpu: its CUDA, the oldest driver that runs it, the newest cards that it knows.

    Drivers for 11.8 and 12.6 as Paddle states them; 12.9 as 12.6 (NVIDIA's compatibility of minor versions); 13.0 as
    NVIDIA's release notes. `capabilities` are the lowest and highest compute capability that this CUDA compiles for.
    """

    cuda: str
    min_driver: str
    capabilities: tuple[float, float]

    @property
    def name(self) -> str:
        """Paddle's name for it, such as cu126."""
        return f"cu{self.cuda.replace('.', '')}"

    @property
    def index_url(self) -> str:
        """Where pip finds it."""
        return f"{INDEX}{self.name}/"

    def fits(self, gpu: Gpu) -> bool:
        """True if the driver is new enough and the card of a kind that this CUDA knows (or of an unknown kind)."""
        low, high = self.capabilities
        return _numbers(gpu.driver) >= _numbers(self.min_driver) and (
            gpu.capability is None or low <= gpu.capability <= high
        )


# In the order of preference: 12.6 runs on every card from Maxwell to Hopper, 12.9 on Blackwell too; 13.0 brings nothing
# that ppldm needs and has dropped cards before Turing; 11.8 is for drivers that are too old for the others.
BUILDS = (
    Build("12.6", "550.54.14", (5.0, 9.0)),
    Build("12.9", "550.54.14", (5.0, 12.1)),
    Build("13.0", "580.65.06", (7.5, 12.1)),
    Build("11.8", "450.80.02", (3.5, 9.0)),
)


def find_build(cuda: str) -> Build:
    """The build for a version of CUDA, such as "12.6". Raises ConfigError."""
    for build in BUILDS:
        if build.cuda == cuda:
            return build
    raise ConfigError(f"--cuda {cuda}: Paddle has builds for CUDA {_names(BUILDS)}; choose the one your driver runs")


def choose_build(gpus: Sequence[Gpu]) -> Build:
    """The preferred build that runs on every one of `gpus`; the first of all where there are none to look at.

    Raises ConfigError where no build does.
    """
    for build in BUILDS:
        if all(build.fits(gpu) for gpu in gpus):
            return build
    raise ConfigError(
        f"{_describe(gpus)}: {why_none_fits(gpus)}, or use the CPU: bash run_scripts/setup.sh --device cpu"
    )


def why_none_fits(gpus: Sequence[Gpu], builds: Sequence[Build] = BUILDS) -> str:
    """What keeps all of `builds` from running on all of `gpus`, with the remedy."""
    oldest = min(builds, key=lambda build: _numbers(build.min_driver))
    if any(_numbers(gpu.driver) < _numbers(oldest.min_driver) for gpu in gpus):
        return (
            f"the driver is too old for Paddle with CUDA {_names(builds)}, which needs {oldest.min_driver} or newer; "
            "renew the driver"
        )
    return f"no build of Paddle with CUDA {_names(builds)} runs on these cards with this driver; choose others"


def check_build(build: Build, gpus: Sequence[Gpu]) -> None:
    """Raise ConfigError where a build that was asked for by name does not run on the machine's GPUs."""
    if not all(build.fits(gpu) for gpu in gpus):
        raise ConfigError(f"--cuda {build.cuda} on {_describe(gpus)}: {why_none_fits(gpus, [build])}, or omit --cuda")


def _describe(gpus: Sequence[Gpu]) -> str:
    return "; ".join(dict.fromkeys(str(gpu) for gpu in gpus))


def _names(builds: Sequence[Build]) -> str:
    return ", ".join(sorted((build.cuda for build in builds), key=_numbers))


def _numbers(version: str) -> tuple[int, ...]:
    """550.54.14 as (550, 54, 14)."""
    return tuple(int(word) for word in version.split("."))
