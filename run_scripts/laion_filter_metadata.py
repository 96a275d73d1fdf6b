"""`ppldm filter` by the flags of the published LAION recipe, whose filter has this name.

python run_scripts/laion_filter_metadata.py --data_dir laion_2b_en_ae4.5 --output_dir laion_2b_en_filtered

Further flags are those of `ppldm filter`: --min_aesthetic 5, --where 'pwatermark <= 0.8', --master spark://host:7077.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppldm.cli.main import run  # noqa: E402
from ppldm.prepare.filter.filter import PRESETS  # noqa: E402
from ppldm.utils.errors import ConfigError, exit_on_error  # noqa: E402


def main(words: list[str]) -> None:
    """Raises PpldmError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, metavar="DIR", help="folder of parquet files, or one file")
    parser.add_argument("--output_dir", metavar="DIR", help="new folder for part_1.parquet, ...")
    parser.add_argument("--dataset_name", default="laion2b_en", metavar="NAME", help="laion2b_en... or laion_art...")
    parser.add_argument("--task", default="filter", choices=("filter", "check"), help="check: print statistics only")
    flags, further = parser.parse_known_args(words)
    name = flags.dataset_name.replace("_", "-")
    preset = next((one for one in PRESETS if name.startswith(one)), None)
    if preset is None:
        raise ConfigError(f"--dataset_name {flags.dataset_name} is not known; use laion2b_en or laion_art")
    task = ["--check"] if flags.task == "check" else ["--preset", preset]
    output = ["--output", flags.output_dir] if flags.output_dir else []
    run(["filter", "--input", flags.data_dir, *output, *task, *further])


if __name__ == "__main__":
    with exit_on_error():
        main(sys.argv[1:])
