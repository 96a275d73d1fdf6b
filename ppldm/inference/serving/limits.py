"""How much may be asked for."""

from dataclasses import dataclass, fields

from ...utils.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Of one request its pictures, their sides in pixels and a sampler's steps; of all the jobs that wait, and the
    pictures in memory, MB."""

    max_pictures: int = 16
    max_side: int = 1024
    max_steps: int = 250
    max_waiting: int = 32
    max_memory_mb: int = 256

    def check(self) -> None:
        """Raises ConfigError."""
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise ConfigError(f"--{one.name} {getattr(self, one.name)} must be above 0")
