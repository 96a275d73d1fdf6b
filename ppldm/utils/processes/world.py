"""Which of how many processes this is, as plain numbers: a laptop test can be rank 37 of 64."""

from dataclasses import dataclass

from ..variables import read


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size` processes. Only `detect` looks at the machine."""

    rank: int = 0
    size: int = 1

    def __post_init__(self):
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def is_main(self) -> bool:
        """True on the one process that writes logs and checkpoints."""
        return self.rank == 0

    @classmethod
    def detect(cls) -> "World":
        """From the variables that `paddle.distributed.launch` sets for each process."""
        return cls(int(read("PADDLE_TRAINER_ID", "0")), int(read("PADDLE_TRAINERS_NUM", "1")))


def shard(count: int, world: World) -> range:
    """Which of `count` things are this rank's: they are dealt out like cards."""
    return range(world.rank, count, world.size)


def gather_in_order(gathered: list[list]) -> list:
    """What all ranks made of their shares, in order: the inverse of `shard`."""
    things = [None] * sum(len(one) for one in gathered)
    for rank, one in enumerate(gathered):
        things[rank :: len(gathered)] = one
    return things
