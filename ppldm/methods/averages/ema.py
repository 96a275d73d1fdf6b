"""The average of the weights that soon forgets the first updates (`--use_ema`).

    d = min(--ema_decay, (1 + n) / (10 + n)) at update n

LitEma of the code of Rombach et al. 2021 (arXiv:2112.10752). Published: no figure of it alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GradualDecay:
    decay: float = 0.9999

    def at(self, update: int) -> float:
        return min(self.decay, (1 + update) / (10 + update))


METHOD = GradualDecay
