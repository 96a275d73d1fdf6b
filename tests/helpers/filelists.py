"""What a filelist names, for tests that look at what a command wrote."""

from pathlib import Path

from ppldm.data.filelist import _read_parts


def read_filelist(path: Path) -> list[Path]:
    return [part for _, part in _read_parts(Path(path))]
