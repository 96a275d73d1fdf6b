"""NVIDIA's GPUs, as their driver's program shows them, and which build of Paddle they need; by Python alone.

The builds are those of Paddle's own package index for 3.3 on Linux; PyPI's newest paddlepaddle-gpu is 2.6. A build
brings the CUDA libraries with it, so that only the driver and the cards decide.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .resources import run_program

INDEX = "https://www.paddlepaddle.org.cn/packages/stable/"  # of Paddle's packages, with a folder for each build
NO_GPU = "nvidia-smi shows no GPU"


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU. `driver` is a version ("550.54.14"), `capability` its compute capability, None where unknown."""

    name: str
    driver: str
    capability: float | None = None
    memory: str = ""

    def __str__(self):
        return f"{self.name} {self.memory}".rstrip() + f", driver {self.driver}"

    @property
    def memory_gib(self) -> int:
        return int(self.memory.split()[0]) // 1024 if self.memory[:1].isdigit() else 0

    @property
    def has_bfloat16(self) -> bool:
        """Whether its units compute in it."""
        return (self.capability or 0) >= 8.0


def list_gpus() -> list[Gpu]:
    """Every NVIDIA GPU that nvidia-smi shows; empty where there is none, or no driver that works."""
    query = ("nvidia-smi", "--format=csv,noheader", "--query-gpu=name,memory.total,driver_version")
    # Drivers before 510 do not know compute_cap and refuse the whole question.
    return parse_gpus(run_program(*query[:-1], f"{query[-1]},compute_cap")) or parse_gpus(run_program(*query))


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs of nvidia-smi's CSV lines: name, memory, driver and, where it is there, compute capability."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 3 and re.fullmatch(r"\d+(\.\d+)+", words[2]):
            known = len(words) > 3 and re.fullmatch(r"\d+\.\d+", words[3])
            gpus.append(Gpu(words[0], words[2], float(words[3]) if known else None, words[1]))
    return gpus


@dataclass(frozen=True)
class Build:
    """A build of paddlepaddle-gpu: its CUDA, the oldest driver that runs it (as Paddle says; of 12.9 as of 12.6, by
    NVIDIA's rule for minor versions, of 13.0 by its release notes), lowest and highest compute capability."""

    cuda: str
    min_driver: str
    capabilities: tuple[float, float]

    @property
    def name(self) -> str:
        """Paddle's name for it, such as cu126."""
        return f"cu{self.cuda.replace('.', '')}"

    @property
    def index_url(self) -> str:
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


def choose_build(gpus: Sequence[Gpu], cuda: str | None = None) -> Build:
    """The preferred build that runs on every one of `gpus`, the first of all where there are none to look at; of a
    version of CUDA where one was asked for, such as "12.6". Raises ConfigError where no build does."""
    builds = [build for build in BUILDS if cuda in (None, build.cuda)]
    if not builds:
        raise ConfigError(
            f"--cuda {cuda}: Paddle has builds for CUDA {_names(BUILDS)}; choose the one your driver runs"
        )
    for build in builds:
        if all(build.fits(gpu) for gpu in gpus):
            return build
    asked = f"--cuda {cuda} on " if cuda else ""
    other = "omit --cuda" if cuda else "use the CPU: bash run_scripts/setup.sh --device cpu"
    shown = "; ".join(dict.fromkeys(map(str, gpus)))
    raise ConfigError(f"{asked}{shown}: {why_none_fits(gpus, builds)}, or {other}")


def why_none_fits(gpus: Sequence[Gpu], builds: Sequence[Build] = BUILDS) -> str:
    """What keeps all of `builds` from running on all of `gpus`, with the remedy."""
    oldest = min(builds, key=lambda build: _numbers(build.min_driver))
    if any(_numbers(gpu.driver) < _numbers(oldest.min_driver) for gpu in gpus):
        return (
            f"the driver is too old for Paddle with CUDA {_names(builds)}, which needs {oldest.min_driver} or newer; "
            "renew the driver"
        )
    return f"no build of Paddle with CUDA {_names(builds)} runs on these cards with this driver; choose others"


def _names(builds: Sequence[Build]) -> str:
    return ", ".join(sorted((build.cuda for build in builds), key=_numbers))


def _numbers(version: str) -> tuple[int, ...]:
    """550.54.14 as (550, 54, 14)."""
    return tuple(int(word) for word in version.split("."))
