"""A checkpoint's record of what it was trained on, and whether a run that resumes it trains on the same."""

from pathlib import Path

from ...data.fingerprint import Fingerprint, find_difference
from ...utils.errors import CheckpointError
from ...utils.log import get_logger

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
