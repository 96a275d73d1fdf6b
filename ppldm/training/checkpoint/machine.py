"""What the last bits of a run depend on besides settings and data, as its checkpoints record it."""

from ...utils.machine.devices import device_model
from ...utils.processes.world import World
from ...utils.variables import read

TUNING = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")  # variables that choose the order of sums on a CPU


def machine_record(world: World) -> dict:
    """The kind of machine that this process computes on, JSON-ready: another one may give other last bits."""
    return {"device": device_model(), "ranks": world.size, **{name: read(name) for name in TUNING}}
