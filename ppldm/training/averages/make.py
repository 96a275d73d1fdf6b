"""`ppldm ema`: any average of a run's weights, made after the training from its snapshots.

Its profile (`methods/averages/ema_posthoc.py`) is put together from those of the snapshots by least squares (EDM2:
Karras et al. 2023, arXiv:2312.02696, appendix C), here under the condition that the coefficients add up to 1: weights
that never change come out as they are, however small the rest. Update k has the profile's integral over k - 1 .. k.
"""

import math
from pathlib import Path

import numpy as np

from ...config.training import LARGEST_STD
from ...diffusion.drawing import kept_of
from ...utils.errors import CheckpointError, ConfigError
from ...utils.text import print_report

WORST = 0.1  # error of a profile from which on its average is not made
_STEPS_SHOWN, _STDS_SHOWN = 12, (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25)


def ema(
    run: str,  # folder of a training run with --ema_posthoc
    std: float = None,  # make the average of this relative standard deviation; without it, list what can be made
    step: int = None,  # the update after which it stands (default: the last snapshots')
    out: str = None,  # folder to write (default: in RUN, its name says which average); one that is there is replaced
    json: bool = False,  # print the report as JSON
):
    """Make an average of a run's weights after the training, and export it, or list those that can be made."""
    from ...utils.files import local_path
    from ...utils.machine.cpu import load_paddle

    if std is not None and not 0 < std <= LARGEST_STD:
        raise ConfigError(f"--std {std:g} must be above 0 and at most {LARGEST_STD}")
    if std is None and (step is not None or out is not None):
        raise ConfigError("--step and --out say which average to write, and where; add --std")
    load_paddle()
    from .snapshots import SNAPSHOTS, list_snapshots

    folder = local_path(run).resolve()
    found = [one for one in list_snapshots(folder) if one.num_updates]
    if not found:
        raise CheckpointError(f"{folder / SNAPSHOTS} holds no snapshots; train with --ema_posthoc 0.05 0.10")
    if std is None:
        print_report({"run": str(folder), **survey(found)}, _describe_survey, json)
        return
    step = found[-1].step if step is None else step
    coefficients, report = choose(found, std, step)
    report = {"run": str(folder), **report, "out": str(export_average(folder, found, coefficients, report, out))}
    said = f"average of std {report['std']:g} after update {report['step']}, from {report['snapshots']} snapshots, "
    said += f"its profile {report['error']:.2%} off: {report['out']}"
    print_report(report, lambda _: said, json)


def survey(found: list) -> dict:
    """What snapshots can make: {"tracked": stds, "steps": all of them, "errors": {step: {std: error}}, "range": the
    lowest and the highest std that can be made at the last step, within `WORST`}. Of many steps, some have errors."""
    num_updates = {one.step: one.num_updates for one in found}
    steps, stored = sorted(num_updates), [(one.std, one.num_updates) for one in found]
    shown = steps[::-1][:: math.ceil(len(steps) / _STEPS_SHOWN)]
    good = makeable(stored, num_updates[steps[-1]], WORST)
    _, errors = combine(stored, [(std, num_updates[step]) for step in shown for std in _STDS_SHOWN])
    by_step = zip(shown, errors.reshape(len(shown), -1).tolist(), strict=True)
    told = {step: dict(zip(_STDS_SHOWN, own, strict=True)) for step, own in by_step}
    reach = [min(good, default=None), max(good, default=None)]
    return {"tracked": sorted({one.std for one in found}), "steps": steps, "errors": told, "range": reach}


def choose(found: list, std: float, step: int):
    """(coefficients of the snapshots, {"std", "step", "num_updates", "error", "snapshots"}). Raises ConfigError for an
    average that they do not make well."""
    counts = {0: 0} | {one.step: one.num_updates for one in found}
    if not 1 <= step <= max(counts):
        raise ConfigError(f"--step {step}: there are snapshots up to update {max(counts)}; choose from 1 to that")
    stored = [(one.std, one.num_updates) for one in found]
    num_updates = max(1, int(np.interp(step, list(counts), list(counts.values()))))
    coefficients, errors = combine(stored, [(std, num_updates)])
    error = float(errors[0])
    if error > WORST:
        good = makeable(stored, num_updates, WORST)
        nearest = min(list(counts)[1:], key=lambda one: abs(one - step))
        remedies = [f"--std from {min(good):g} to {max(good):g}"] if good else []
        remedies += [f"--step {nearest}, which has snapshots"] if step != nearest else []
        text = f"--std {std:g} at update {step} would be {error:.0%} off its profile"
        raise ConfigError(f"{text}; choose {' or '.join(remedies) or 'a later --step'}")
    report = {"std": std, "step": step, "num_updates": num_updates, "error": error, "snapshots": len(found)}
    return coefficients[:, 0], report


def combine(stored: list[tuple[float, int]], wanted: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients [len(stored), len(wanted)] float64, whose columns each add up to 1; errors [len(wanted)]). stored,
    wanted: (standard deviation, number of updates) of each snapshot, and of each average to make. error: the L2 norm of
    (profile made - profile wanted), divided by the norm of the profile wanted. Where weights vary independently around
    a mean, the average of the weights is off by the same share."""
    from ...methods.averages.ema_posthoc import exponent_of

    powers, ends = np.array([(exponent_of(std), end) for std, end in [*stored, *wanted]], np.float64).T
    inner, count = _inner(powers, ends), len(stored)
    scale = np.sqrt(np.diag(inner))
    inner /= np.outer(scale, scale)
    own, new = scale[:count].min() / scale[:count], scale[:count].min() / scale[count:]
    system = np.block([[inner[:count, :count], own[:, None]], [own, np.zeros(1)]])  # own: that they add up to 1
    found = np.linalg.lstsq(system, np.vstack([inner[:count, count:], new]), rcond=None)[0][:count]
    squares = 1 + np.sum(found * (inner[:count, :count] @ found - 2 * inner[:count, count:]), axis=0)
    return found * own[:, None] / new, np.sqrt(np.maximum(squares, 0))


def makeable(stored: list[tuple[float, int]], num_updates: int, worst: float) -> list[float]:
    """Of standard deviations from 0.01 up, in steps of 0.005, those whose error is `worst` or less."""
    grid = np.round(np.arange(0.01, LARGEST_STD + 0.001, 0.005), 3).tolist()
    _, errors = combine(stored, [(std, num_updates) for std in grid])
    return [std for std, error in zip(grid, errors, strict=True) if error <= worst]


def _inner(powers: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integrals of p_i p_j over 0 .. min(n_i, n_j), [len(powers), len(powers)]."""
    one, other = powers[:, None] + 1, powers + 1
    log_end, sums = np.log(ends), one + other - 1
    shared = np.minimum(log_end[:, None], log_end)
    return one * other / sums * np.exp(sums * shared - one * log_end[:, None] - other * log_end)


def add_up(found: list, coefficients) -> dict:
    """The sum of snapshots with their coefficients: float32 arrays by parameter. One file is in memory at a time."""
    from ...utils.log import progress

    total = {}
    with progress(zip(found, coefficients, strict=True), desc="snapshots", unit="file", total=len(found)) as pairs:
        for snapshot, coefficient in pairs:
            for name, array in snapshot.read().items():
                term = array.astype(np.float32) * np.float32(coefficient)
                total[name] = total[name] + term if name in total else term
    return total


def export_average(folder: Path, found: list, coefficients, report: dict, out: str | None) -> Path:
    """Write the average as the family's export has it, and return the folder. What is not trained comes from the newest
    checkpoint. Raises CheckpointError, ConfigError, ModelError."""
    from ... import __version__
    from ...config.recipe import RECIPE_FILE
    from ...families.base import saved_recipe
    from ...inference.export import refuse_to_overwrite
    from ...methods.averages.ema_posthoc import PowerDecay
    from ...networks.ema import ExponentialMovingAverage
    from ...utils.files import in_working_folder, local_path, read_json, write_text
    from ...weights.folders import CHECKPOINT_WEIGHTS
    from ...weights.formats.files import read_arrays
    from ..checkpoint import newest_checkpoint, read_manifest

    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no checkpoint to take the rest of the model from; restore one")
    manifest = read_manifest(checkpoint)
    recipe, family = saved_recipe(checkpoint / RECIPE_FILE)
    name = f"{family.export_folder}-std{report['std']:g}-step{report['step']}"
    target = local_path(out).resolve() if out else folder / name
    refuse_to_overwrite(checkpoint, target)
    with in_working_folder(manifest):
        model = family.build(recipe.model, recipe.data, recipe.training.seed)
    own = model.state_dict()
    arrays = read_arrays(checkpoint / CHECKPOINT_WEIGHTS, own.__contains__)
    model.set_state_dict(own | {name: array.astype(own[name].numpy().dtype) for name, array in arrays.items()})
    average = ExponentialMovingAverage(model.trained_parameters(), PowerDecay(report["std"]))
    average.load_state_dict({**add_up(found, coefficients), "num_updates": report["num_updates"]})
    exported = read_json(folder / family.export_folder / "ppldm.json") or {}
    samples_seen = manifest["samples_seen"] // manifest["global_step"] * report["step"]
    metadata = {"ppldm": __version__, "global_step": report["step"], "samples_seen": samples_seen}
    metadata |= {**kept_of(manifest), **manifest["identity"], "ema_std": report["std"]}
    metadata |= {name: exported[name] for name in ("example_prompt", "scaling_factor") if name in exported}
    family.export(model, recipe.model, None, target, average, metadata)
    write_text(target / RECIPE_FILE, (checkpoint / RECIPE_FILE).read_text(encoding="utf-8"))
    return target


def _describe_survey(report: dict) -> str:
    """A table of errors, a line for each step."""
    tracked = " and ".join(f"{std:g}" for std in report["tracked"])
    low, high = report["range"]
    lines = [
        f"{report['run']}: averages of {tracked}, snapshots after {len(report['steps'])} updates",
        "how far the profile of each --std is off, by --step:",
        f"{'':>10}" + "".join(f"{std:>8g}" for std in _STDS_SHOWN),
    ]
    for step, errors in report["errors"].items():
        cells = (f"{error:.1%}" if error <= WORST else "-" for error in errors.values())
        lines.append(f"{step:>10}" + "".join(f"{cell:>8}" for cell in cells))
    if low is not None:
        lines.append(f"after update {report['steps'][-1]}, --std from {low:g} to {high:g} can be made")
    return "\n".join(lines)
