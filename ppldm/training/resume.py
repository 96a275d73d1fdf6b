"""Going on from a checkpoint: what it says is compared with this run by name before any weight is read."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle

from ..data.filelist import Fingerprint, find_difference
from ..utils.checksums import checksum_arrays
from ..utils.errors import CheckpointError, ConfigError, PpldmError
from ..utils.log import get_logger
from ..utils.machine.devices import host_memory
from ..weights.folders import CHECKPOINT_WEIGHTS
from ..weights.formats.files import read_arrays
from ..weights.formats.paddle_files import NAME_TABLE, read_tree
from ..weights.model_file import ModelDescription, has_model_file, read_model_file
from .checkpoint import DATA_FILE, POSTHOC_STATE, TrainingState, read_manifest, versions, without
from .optimizer import in_8_bits, is_sharded, matrices_of, parameter_of

# Settings that follow from others: where one of those differs too, it is the one to name.
_FOLLOW = ("rows", "max_steps")
# What every run was, before it could be otherwise and was recorded.
_ONCE: dict = {"buckets": None, "text_embeddings": None, "empty_caption": "embedding", "optimizer": "adamw"}
_ONCE |= {"bucket_random_ratio": 0.0, "bucket_max_upscale": None}
_REMEDY = "resume with the flags the run was started with, or use another --output_dir"


def restore(
    checkpoint: Path | None,
    state: TrainingState,
    identity: dict,
    description: ModelDescription,
    data: Fingerprint,
    accepted: Iterable[str] = (),
) -> tuple[int, dict]:
    """Read the weights of a checkpoint into `state`. (its step, what it had not logged); (0, {}) where there is none.

    Raises CheckpointError naming all settings, components, process and tokenizer, and the part of the data, in which
    the checkpoint differs from this run, and which are not among those `accepted`; ConfigError for one of those that
    there is not. What an older checkpoint does not record is not compared. A frozen component whose change is accepted
    keeps the weights that this run has given it."""
    now = identity | description.settings()
    for name in accepted:
        if name not in now:
            raise ConfigError(f"--accept_changes {name}: there is no such setting; choose from {', '.join(now)}")
    if checkpoint is None:
        return 0, {}
    manifest = read_manifest(checkpoint)
    accepted = {*accepted, "rows"} if "data" in accepted else set(accepted)  # their number goes with them
    then = _ONCE | manifest["identity"] | _recorded(checkpoint, description)
    other_data = compare_data(checkpoint, manifest, data)
    changes = {"data": [f"the data: {other_data}"]} if other_data else {}
    for name, value in sorted(now.items(), key=lambda item: item[0] in _FOLLOW):
        if name != "data" and (found := differences(name, then.get(name, value), value)):
            changes[name] = [f"{what} {before}, this run has {after}" for what, before, after in found]
    frozen = [name for name, component in description.components.items() if not component.trained]
    kept = tuple(name for name in frozen if name in changes)
    if refused := {name: said for name, said in changes.items() if name not in accepted}:
        raise CheckpointError(_explain(checkpoint, state, refused, kept))
    for said in changes.values():
        get_logger().info("as accepted, from update %d on no longer %s", manifest["global_step"], "; ".join(said))
    load_model(checkpoint, state, kept)
    get_logger().info("resuming from %s", checkpoint)
    for name, version in versions().items():
        before = manifest.get("versions", {}).get(name, version)
        if before != version:
            get_logger().info("it was written with %s %s, this is %s: bits may differ", name, before, version)
    return manifest["global_step"], manifest["unlogged"]


def differences(name: str, then, now) -> list[tuple]:
    """(what, its value then, its value now) of each difference. Of two dicts, what one of them does not say is not
    compared, and the entries that differ are named with them."""
    if not isinstance(now, dict) or not isinstance(then, dict):
        return [] if then == now else [(name, then, now)]
    return [(f"{name}'s {key}", then[key], now[key]) for key in now if key in then and then[key] != now[key]]


def _explain(checkpoint: Path, state: TrainingState, refused: dict[str, list[str]], kept: tuple[str, ...]) -> str:
    """What differs, and what to do: that the changes may be accepted is said only where the checkpoint then fits."""
    said = [one for name, found in refused.items() if name != "data" for one in found]
    text = f"{checkpoint} was trained "
    text += f"on other {refused['data'][0].removeprefix('the ')}; " if "data" in refused else ""
    text += f"{'and ' if 'data' in refused else ''}with {'; '.join(said)}; " if said else ""
    try:
        load_model(checkpoint, state, kept)
        load_optimizer(checkpoint, state)
    except PpldmError as error:
        return f"{text}that cannot be accepted: {error}"
    same = "data" if not said else "setting" if len(said) == 1 else "settings"
    what = "them and their order" if not said else "the change" if len(refused) == 1 else "the changes"
    accept = f"accept {what} with --accept_changes {' '.join(refused)}"
    return f"{text}resume with the same {same}, {accept}, or start anew in another --output_dir"


def _recorded(checkpoint: Path, description: ModelDescription) -> dict:
    """What a checkpoint says of its networks. Of an older one, without model.json, the weights of those that are not
    trained tell whether they are this run's."""
    if has_model_file(checkpoint):
        return read_model_file(checkpoint).settings()
    frozen = tuple(f"{name}." for name, component in description.components.items() if not component.trained)
    arrays = read_arrays(checkpoint / CHECKPOINT_WEIGHTS, lambda name: name.startswith(frozen)) if frozen else {}
    own = {prefix: {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)} for prefix in frozen}
    return {prefix[:-1]: {"weights": checksum_arrays(found.items())} for prefix, found in own.items()}


def compare_data(checkpoint: Path, manifest: dict, data: Fingerprint) -> str | None:
    """The part or list where `data` differs, in words; None where nothing does. An earlier version's checkpoint without
    a record is taken as it is, with a line in the log. Raises CheckpointError for a record that cannot be read."""
    recorded = manifest["identity"].get("data")
    if recorded is None:
        get_logger().info("%s does not record its data: that they are the same is not checked", checkpoint)
    elif recorded != data.digest:
        try:
            record = (checkpoint / DATA_FILE).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {checkpoint / DATA_FILE}: {error.strerror}; restore it") from error
        return find_difference(Fingerprint.from_record(record), data)
    return None


def load_model(folder: Path, state: TrainingState, kept: tuple[str, ...] = ()) -> None:
    """Read weights and their average into `state`, but for the components `kept`, whose weights stay as they are.
    Raises CheckpointError where they do not fit."""
    kept = (*(f"{name}." for name in kept), *state.unsaved)
    weights = _load(folder / "model_state.pdparams", return_numpy=True)
    own = state.model.state_dict()
    weights = without(weights, kept)
    weights |= {name: value.numpy() for name, value in own.items() if name.startswith(kept)}
    for name, value in own.items():
        found = tuple(weights[name].shape) if name in weights else "nothing"
        if found != (wanted := tuple(value.shape)):
            raise CheckpointError(f"{folder} holds {found} for {name}, this model wants {wanted}; {_REMEDY}")
    if unknown := weights.keys() - own.keys():
        raise CheckpointError(f"{folder} holds weights that this model has not, {min(unknown)} for one; {_REMEDY}")
    state.model.set_state_dict(weights)
    average = folder / "ema_state.pdparams"
    if state.ema:
        if not average.is_file():
            fix = "resume without --use_ema, as the run was started"
            raise CheckpointError(f"{folder} holds no averaged weights; {fix}")
        state.ema.load_state_dict(_load(average, return_numpy=True))
    elif average.is_file():
        get_logger().warning("%s holds averaged weights, which are dropped: --use_ema is not given", folder)
    _load_posthoc(folder / POSTHOC_STATE, state)


def _load_posthoc(path: Path, state: TrainingState) -> None:
    if not state.posthoc:
        if path.is_file():
            get_logger().warning("%s is dropped: --ema_posthoc is not given", path)
        return
    found = _load(path, return_numpy=True) if path.is_file() else {}
    for std, average in state.posthoc.items():
        if f"{std:g}" not in found:
            text = f"{path.parent} holds no average of --ema_posthoc {std:g}, which is tracked from the first update on"
            fix = "resume as the run was started, or start anew in another --output_dir"
            raise CheckpointError(f"{text}; {fix}")
        average.load_state_dict(found[f"{std:g}"])


def _load(path: Path, return_numpy: bool = False) -> dict:
    """What paddle.load would give of a file that paddle.save wrote; nothing in it is run. Raises ModelError."""
    tree = read_tree(path)
    names = tree.pop(NAME_TABLE, {})
    for key, name in names.items() if isinstance(names, dict) else ():
        if isinstance(tree.get(key), np.ndarray):
            tree[key] = (name, tree[key])
    return _as_tensors(tree, return_numpy)


def _as_tensors(value, return_numpy: bool):
    """Arrays, alone or as (name, array), as tensors of that name on the current device, or as arrays."""
    if isinstance(value, dict):  # which is emptied meanwhile: an optimizer's state is too large to have it twice
        return {key: _as_tensors(value.pop(key), return_numpy) for key in list(value)}
    name, array = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    if not isinstance(array, np.ndarray):
        return value
    if return_numpy:
        return array
    tensor = paddle.to_tensor(array)  # of uint16, which stands for it, bfloat16
    if name:
        tensor.name = name
    return tensor


def load_optimizer(folder: Path, state: TrainingState) -> None:
    """Read optimizer, schedule and scaler into `state`. Raises CheckpointError where some parameters have moments and
    others none, or those of another optimizer; before the first update, none has."""
    with host_memory() if is_sharded(state.optimizer) else nullcontext():
        moments = _load(folder / "optimizer.pdopt")
    known = {parameter_of(key) for key in moments} - {None}
    squares = {parameter_of(key) for key in moments if "_moment2_" in key}
    known &= squares ^ matrices_of(state.optimizer)  # which have no mean of squares
    known -= {parameter_of(key) for key in moments if "_absmax2_" in key} ^ in_8_bits(state.optimizer)
    known |= state.untrained(read_manifest(folder)["global_step"]) if known else set()
    for parameter in state.model.parameters():
        if known and not parameter.stop_gradient and parameter.name not in known:
            raise CheckpointError(f"{folder} has no optimizer state for {parameter.name}; {_REMEDY}")
    state.optimizer.set_state_dict(moments)
    state.scheduler.set_state_dict(_load(folder / "scheduler.pdparams"))
    # There is none where the run went on in float16 only now, which --accept_changes precision allows.
    if state.scaler and (folder / "scaler.pdparams").is_file():
        state.scaler.load_state_dict(_load(folder / "scaler.pdparams", return_numpy=True))
