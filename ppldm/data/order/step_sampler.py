"""Which samples a rank trains on: a pure function of (order, batch sizes, world, step). Resuming is a start step."""

from collections.abc import Iterator

from ...utils.errors import ConfigError, DataError
from ...utils.processes.world import World
from ...utils.text import count_of
from ..levels import Strata
from .groups import Groups
from .rows import Mix


class StepSampler:
    """The micro-batches of one rank, in order, for steps start_step to max_steps - 1.

    Global batch s is the positions [s * B, (s + 1) * B) of the order, B = global_batch_size. Rank r takes its
    contiguous slice of B / world.size, cut into micro-batches of micro_batch_size. A micro-batch is a list of (epoch,
    row); of an order in groups, those of one shape, as it lies within a group.

    Raises ConfigError where B is not a multiple of world.size * micro_batch_size, or the share of a rank is not one of
    whole groups, or a group not one of whole micro-batches; DataError where there are fewer rows than one global batch.
    """

    def __init__(
        self,
        mix: Mix | Groups,
        global_batch_size: int,
        micro_batch_size: int,
        world: World,
        start_step: int,
        max_steps: int,
    ):
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (world.size * micro_batch_size):
            raise ConfigError(
                f"a global batch of {global_batch_size} rows cannot be cut into micro-batches of {micro_batch_size} on "
                f"{count_of(world.size, 'rank')}; make it a multiple of {world.size * micro_batch_size}"
            )
        if group_size := mix.group_size:
            self._check_groups(group_size, global_batch_size // world.size, micro_batch_size)
        if mix.num_rows < global_batch_size:
            raise DataError(
                f"the filelists hold {mix.num_rows} rows, fewer than one global batch of {global_batch_size} "
                f"(batch size x accumulation x {count_of(world.size, 'rank')}); add rows, or make "
                "--per_device_train_batch_size or --gradient_accumulation_steps smaller"
            )
        self.mix, self.world = mix, world
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.start_step, self.max_steps = start_step, max_steps

    @staticmethod
    def _check_groups(group_size: int, rank_batch_size: int, micro_batch_size: int) -> None:
        if rank_batch_size % group_size or group_size % micro_batch_size:
            raise ConfigError(
                f"{rank_batch_size} rows of a rank and update in micro-batches of {micro_batch_size} cannot be made of "
                f"groups of {group_size} rows of one shape; give --bucket_group_size {micro_batch_size}, or another of "
                f"its multiples that divide {rank_batch_size}"
            )

    def __len__(self) -> int:
        micro_batches = self.global_batch_size // (self.world.size * self.micro_batch_size)
        return max(0, self.max_steps - self.start_step) * micro_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rank_batch_size = self.global_batch_size // self.world.size
        for step in range(self.start_step, self.max_steps):
            first = step * self.global_batch_size + self.world.rank * rank_batch_size
            epochs, rows = self.mix.samples(first, first + rank_batch_size)
            samples = list(zip(epochs.tolist(), rows.tolist(), strict=True))
            for start in range(0, rank_batch_size, self.micro_batch_size):
                yield samples[start : start + self.micro_batch_size]

    def strata(self, number: int) -> Strata:
        """Where the samples of micro-batch `number` of this rank, counted from 0, stand in their update."""
        rank_batch_size = self.global_batch_size // self.world.size
        step, start = divmod(number * self.micro_batch_size, rank_batch_size)
        return Strata(self.start_step + step, self.world.rank * rank_batch_size + start, self.global_batch_size)
