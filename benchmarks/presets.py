"""What each preset takes:  python benchmarks/presets.py [--presets NAME ...] [--json [OUT]]

What `ppldm train --preset NAME --dry_run` says where there is a GPU: parameters, pixels, memory of a device,
floating-point operations of an update, hours at a stated speed. Nothing is trained, and nothing needs to be there.
"""

import argparse
import os
import re
import tempfile
from unittest import mock

from results import add_result_flags, save_results

from ppldm.config.load import list_presets
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.train import check_early
from ppldm.training.doctor.memory import forecast
from ppldm.utils.log import get_logger
from ppldm.utils.machine.devices import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=list(list_presets()), metavar="NAME")
    add_result_flags(parser, "presets")
    arguments, results = parser.parse_args(), {}
    for name in arguments.presets:
        results[name] = take(name)
        save_results(arguments, results)
        print(f"{name:<34}", *(f"{key} {value}" for key, value in results[name].items()), flush=True)


def take(name: str) -> dict:
    """Of a preset, on as many devices as its description names, from a folder in which nothing is."""
    devices = 8 if re.search(r"(?i)\b(eight|8) cards", list_presets()[name]) else 1
    get_logger().setLevel("ERROR")
    before = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("ppldm.training.doctor.memory.current_kind", lambda: KINDS["gpu"]),
    ):
        os.chdir(folder)
        try:
            recipe = check_early(["--preset", name, "--dry_run"], config=None)
            found = reckon(recipe, devices) | forecast(recipe, devices)
        finally:
            os.chdir(before)
    memory = sum(found["bytes_a_device"].values()) + found["bytes_of_activations"]
    return {
        "devices": devices,
        "trained": sum(part["trained"] for part in found["components"].values()),
        "parameters": sum(part["parameters"] for part in found["components"].values()),
        "pixels": recipe.data.resolution,
        "samples_an_update": found["samples_an_update"],
        "memory_gb": round(memory / 1e9, 2),
        **{key: found[key] for key in ("not_counted", "operations_an_update", "updates", "hours")},
    }


if __name__ == "__main__":
    main()
