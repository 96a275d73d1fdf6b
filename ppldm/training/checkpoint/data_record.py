"""A checkpoint's record of what it was trained on, and whether a run that resumes it trains on the same."""

from pathlib import Path

from ...data.fingerprint import Fingerprint, find_difference
from ...utils.errors import CheckpointError
from ...utils.log import get_logger

DATA_FILE = "data.json.gz"


def compare_data(checkpoint: Path, manifest: dict, data: Fingerprint, accepted: list[str]) -> list[str]:
    """The settings that may differ: those `accepted`, and with `data` the number of rows, which goes with them.

    Raises CheckpointError that names the part or list where `data` differs, unless `data` is accepted. A checkpoint
    without a record, as earlier versions wrote it, is taken as it is, with a line in the log.
    """
    recorded = manifest["identity"].get("data")
    if recorded is None:
        get_logger().info("%s does not record its data: that they are the same is not checked", checkpoint)
    elif recorded != data.digest:
        difference = find_difference(Fingerprint.from_record((checkpoint / DATA_FILE).read_bytes()), data)
        if "data" not in accepted:
            raise CheckpointError(
                f"{checkpoint} was trained on other data: {difference}; resume with the same data, accept them and "
                "their order with --accept_changes data, or start anew in another --output_dir"
            )
        get_logger().warning("the data change at update %d: %s", manifest["global_step"], difference)
    return [*accepted, "data", "rows"] if "data" in accepted else accepted
