"""One shard whose part lies at an address: made in a folder of the executor, then put there.

Law: the shard is the one that `shard.download_shard` makes, and at its address, too, it is finished or absent:
`NNNNN_stats.json` gets its name last. A journal is of this machine and ends with the try, so that what was fetched for
a shard that was not finished is fetched again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...utils.errors import PpldmError
from ..address_path import AddressPath, put_files
from ..executor_hadoop import local_folder, reaching
from .shard import ShardSettings, ShardTask, download_shard, find_pieces, record_path, stats_path, work_folder


def download_shard_at(task: ShardTask, settings: ShardSettings, hadoop: str) -> dict:
    """Download a shard to its address and return its record; `hadoop` are the settings of the file systems. Raises as
    `shard.download_shard`."""
    with reaching(hadoop) as client, local_folder() as folder:
        part, rows_file = task.part_folder.at(client), task.rows_file.at(client)
        local = replace(task, part_folder=folder / part.name, rows_file=folder / rows_file.name)
        client.fetch(str(rows_file), str(local.rows_file))
        try:
            record = download_shard(local, settings)
        except PpldmError as error:
            raise type(error)(str(error).replace(str(local.part_folder), str(part))) from error
        put_shard(local.part_folder, part, task.number)
        rows_file.remove()
    return record


def put_shard(folder: Path, part: AddressPath, number: int) -> None:
    """Copy a finished shard from a part's folder here to that at an address, in place of what there is of it."""
    files = {piece: part / piece.name for piece in find_pieces(folder, number)}
    files |= {find(folder, number): find(part, number) for find in (record_path, stats_path)}
    put_files(files, [*find_pieces(part, number), record_path(part, number)], work_folder(part))
