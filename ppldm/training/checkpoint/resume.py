"""Whether a checkpoint is of this run: settings and networks are compared by name before any weight is read."""

from collections.abc import Iterable
from pathlib import Path

from ...data.fingerprint import Fingerprint, find_difference
from ...utils.checksums import checksum_arrays
from ...utils.errors import CheckpointError, ConfigError, PpldmError
from ...utils.log import get_logger
from ...weights.folders import CHECKPOINT_WEIGHTS
from ...weights.formats.files import read_arrays
from ...weights.model_file import ModelDescription, has_model_file, read_model_file
from .checkpoint import TrainingState, load_model, load_optimizer, read_manifest, versions

# Settings that follow from others: where one of those differs too, it is the one to name.
_FOLLOW = ("rows", "max_steps")
# What every run was, before it could be otherwise and was recorded.
_ONCE = {"buckets": None, "text_embeddings": None, "empty_caption": "embedding"}


def restore(
    checkpoint: Path | None,
    state: TrainingState,
    identity: dict,
    description: ModelDescription,
    data: Fingerprint,
    accepted: Iterable[str] = (),
) -> tuple[int, dict]:
    """Read the weights of a checkpoint into `state`. (its step, what it had not logged); (0, {}) where there is none.

    Raises CheckpointError naming all settings, components, process and tokenizer in which the checkpoint differs from
    this run, and which are not among those `accepted`, and the part in which its data differ from `data`; ConfigError
    for one of those accepted that there is not. What an older checkpoint does not record is not compared. A component
    that is frozen and whose change is accepted keeps the weights that this run has given it.
    """
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
    """(what, its value then, its value now) of each difference.

    Of two dicts, what one of them does not say is not compared, and the entries that differ are named with them.
    """
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
    return (
        f"{text}resume with the same {same}, accept {what} with --accept_changes {' '.join(refused)}, or start anew in "
        "another --output_dir"
    )


def _recorded(checkpoint: Path, description: ModelDescription) -> dict:
    """What a checkpoint says of its networks. Of an older one, without model.json, the weights of those that are not
    trained tell whether they are this run's."""
    if has_model_file(checkpoint):
        return read_model_file(checkpoint).settings()
    frozen = tuple(f"{name}." for name, component in description.components.items() if not component.trained)
    arrays = read_arrays(checkpoint / CHECKPOINT_WEIGHTS, lambda name: name.startswith(frozen)) if frozen else {}
    return {
        prefix[:-1]: {
            "weights": checksum_arrays((n.removeprefix(prefix), a) for n, a in arrays.items() if n.startswith(prefix))
        }
        for prefix in frozen
    }


DATA_FILE = "data.json.gz"


def compare_data(checkpoint: Path, manifest: dict, data: Fingerprint) -> str | None:
    """The part or list where `data` differs, in words; None where nothing does. A checkpoint without a record, as
    earlier versions wrote it, is taken as it is, with a line in the log. Raises CheckpointError for a record that
    cannot be read."""
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
