"""`ppldm report`: what became of runs, as one HTML file that opens without a network; and the sweep of guidance."""

from typing import Annotated

from ..utils.errors import ConfigError, DataError, OutputError
from ..utils.files import atomic_write, local_path
from ..utils.log import get_logger
from ..utils.text import NOT_UTF8
from ..weights.runs import runs_in

_Runs = Annotated[list[str], {"opt": False, "nargs": "*", "type": str, "metavar": "RUN"}]
_Results = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "RESULT"}]


def report(
    runs: _Runs = (),  # folders of runs, or folders that hold runs; several are shown side by side
    sweep: _Results = (),  # results of `ppldm evaluate` at several guidance scales, or folders that hold them
    out: str = None,  # file to write, default: report.html in the first RUN; a .png holds only the sweep's curve
):
    """Write curves, pictures, data, recipe, time and cost of runs into one HTML file."""
    from ..utils.web.page import save_figure
    from .page import make_file
    from .plots import draw_sweep, read_sweep

    target = local_path(out) if out else local_path((*runs, ".")[0]) / "report.html"
    picture = target.suffix.lower() == ".png"
    if not runs and not sweep:
        raise ConfigError("nothing to report; name the folder of a run, or results with --sweep")
    if picture and (runs or not sweep):
        raise ConfigError(f"--out {target} can hold only the curve of --sweep; name a .html for runs")
    found, curves = _read(runs), read_sweep([local_path(one) for one in sweep])
    try:
        with atomic_write(target) as file:
            if picture:
                save_figure(draw_sweep(curves), file, "png")
            else:
                file.write(make_file(found, curves).encode(errors=NOT_UTF8))
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; give another --out") from error
    get_logger().info("report: %s", target)


def _read(places) -> list:
    """All runs of these folders. One that lies below a folder that was named, and has no line yet, is passed over.
    Raises ConfigError, DataError."""
    from .page import read_whole

    found, problems = [], []
    for run in dict.fromkeys(run for place in places for run in runs_in(place)):
        try:
            found.append(read_whole(run))
        except DataError as error:
            if run in map(local_path, places):
                raise
            problems.append(error)
            get_logger().warning("passing over %s: %s", run, error)
    if problems and not found:
        raise problems[0]
    return found
