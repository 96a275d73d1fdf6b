"""The average of the weights at every so many updates (`--ema_iters`), a copy of them in the first ones.

    d = --ema_beta at every --ema_iters-th update after --ema_start_iters, 0 at every such before

Stable Cascade's training (its guide of training, train/readme.md). Published: a large gain, says the guide, without a
figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IntervalDecay:
    start_iters: int = 5000
    iters: int = 100
    beta: float = 0.9

    def at(self, update: int) -> float:
        if update % self.iters:
            return 1.0
        return self.beta if update > self.start_iters else 0.0


METHOD = IntervalDecay
