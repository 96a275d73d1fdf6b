"""Whether a checkpoint is of this run: settings and networks are compared by name before any weight is read."""

from collections.abc import Iterable
from pathlib import Path

from ...data.fingerprint import Fingerprint
from ...utils.checksums import checksum_arrays
from ...utils.errors import CheckpointError, ConfigError
from ...utils.log import get_logger
from ...weights.folders import CHECKPOINT_WEIGHTS
from ...weights.formats.files import read_arrays
from ...weights.model_file import ModelDescription, has_model_file, read_model_file
from .checkpoint import TrainingState, load_model, read_manifest, versions
from .data_record import compare_data

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

    Raises CheckpointError naming the first setting, component, process or tokenizer in which the checkpoint differs
    from this run, and which is not among those `accepted`, or the part in which its data differ from `data`;
    ConfigError for one of those accepted that there is not. What an
    older checkpoint does not record is not compared. A component that is frozen and whose change is accepted keeps the
    weights that this run has given it.
    """
    now = identity | description.settings()
    for name in accepted:
        if name not in now:
            raise ConfigError(f"--accept_changes {name}: there is no such setting; choose from {', '.join(now)}")
    if checkpoint is None:
        return 0, {}
    manifest = read_manifest(checkpoint)
    accepted = compare_data(checkpoint, manifest, data, list(accepted))
    then = _ONCE | manifest["identity"] | _recorded(checkpoint, description)
    changed = []
    for name, value in sorted(now.items(), key=lambda item: item[0] in _FOLLOW):
        if name == "data" or (difference := differing(name, then.get(name, value), value)) is None:
            continue  # of data, `compare_data` has said all
        what, before, after = difference
        if name not in accepted:
            raise CheckpointError(
                f"{checkpoint} was trained with {what} {before}, this run has {after}; resume with the same setting, "
                f"accept the change with --accept_changes {name}, or start anew in another --output_dir"
            )
        changed.append(name)
        get_logger().warning("%s changes from %s to %s at update %d", what, before, after, manifest["global_step"])
    frozen = [name for name, component in description.components.items() if not component.trained]
    load_model(checkpoint, state, kept=tuple(name for name in frozen if name in changed))
    get_logger().info("resuming from %s", checkpoint)
    for name, version in versions().items():
        before = manifest.get("versions", {}).get(name, version)
        if before != version:
            get_logger().info("it was written with %s %s, this is %s: bits may differ", name, before, version)
    return manifest["global_step"], manifest["unlogged"]


def differing(name: str, then, now) -> tuple | None:
    """(what, its value then, its value now) of the first difference; None where there is none.

    Of two dicts, what one of them does not say is not compared, and the entry that differs is named with them.
    """
    if not isinstance(now, dict) or not isinstance(then, dict):
        return None if then == now else (name, then, now)
    return next(
        ((f"{name}'s {key}", then[key], now[key]) for key in now if key in then and then[key] != now[key]), None
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
