"""Write a filelist of part files to the working directory: by default the 60,000 of LAION-400M.

`python data/filelist/write_filelist.py --help` explains the flags.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fastcore.script import call_parse  # noqa: E402

from ppldm.data.filelist import list_parts, write_filelist  # noqa: E402
from ppldm.utils.errors import FilelistError, exit_on_error  # noqa: E402


def number_parts(pattern: str, num_parts: int) -> list[str]:
    """`pattern`, with a field such as `{:05}`, for the numbers from 0 to num_parts - 1. Raises FilelistError."""
    try:
        names = [pattern.format(number) for number in range(num_parts)]
    except (IndexError, KeyError, ValueError) as error:
        raise FilelistError(
            f"cannot number the parts by {pattern!r} ({error}); write it as in part-{{:05}}.gz"
        ) from error
    if len(set(names)) < num_parts:
        raise FilelistError(f"{pattern!r} gives all parts the same name; give it a number field, as in part-{{:05}}.gz")
    return names


@call_parse
def main(
    pattern: str = "/data/laion400m/part-{:05}.gz",  # Path of a part, with a format field for its number
    num_parts: int = 60_000,  # How many parts to name, from number 0
    dir: str = "",  # List the part files of this folder instead
    output: str = "laion400m_en.filelist",  # The filelist to write
):
    """Write a filelist of part files: by default the 60,000 of LAION-400M."""
    with exit_on_error():
        write_filelist(output, list_parts(dir) if dir else number_parts(pattern, num_parts))
