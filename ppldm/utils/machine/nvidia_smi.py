"""NVIDIA's GPUs, as their driver's program shows them: before Paddle is installed or imported."""

import re
from dataclasses import dataclass

from .resources import run_program

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
        """Rounded down; 0 where it is unknown."""
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
