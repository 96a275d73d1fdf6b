"""`ppldm annotate` by the flags of the published LAION recipe, whose annotation script has this name.

python run_scripts/laion_to_csv.py --data_dir laion_2b_en_images
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppldm.cli.main import run  # noqa: E402
from ppldm.utils.errors import exit_on_error  # noqa: E402


def main(words: list[str]) -> None:
    """Raises PpldmError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, metavar="DIR", help="folder of part_1, ..., or of 00000, ...")
    parser.add_argument("--folder_prefix", default="", metavar="PATH", help="put before every path")
    each, choices = {"nargs": "?", "const": "true", "default": "false"}, ("true", "false")
    parser.add_argument("--save_csv_per_img_folder", **each, type=str.lower, choices=choices, help="for each shard too")
    flags = parser.parse_args(words)
    each_shard = ["--save-csv-per-img-folder"] * (flags.save_csv_per_img_folder == "true")
    run(["annotate", flags.data_dir, "--folder-prefix", flags.folder_prefix, *each_shard])


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1:])
