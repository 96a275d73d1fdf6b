"""`--config FILE`, `--preset NAME` and `key.sub=value` on a command line: what says the settings besides its flags."""

import argparse
import re
import sys
from dataclasses import dataclass

from ..utils.errors import ConfigError
from .flags import parse_known
from .load import Layer, file_layers, preset_layers
from .presets import list_presets
from .recipe import SECTIONS

_OVERRIDE = re.compile(rf"(family|({'|'.join(SECTIONS)})\.[^=\s]*)=", re.ASCII)


@dataclass(frozen=True)
class Sources:
    """A command line taken apart: layers of preset and file, the weakest first; words that override; flags."""

    layers: list[Layer]
    overrides: list[str]
    flags: list[str]
    print_config: bool


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `split_sources` takes."""
    group = parser.add_argument_group("recipe (docs/training.md)", "key=value, as data.resolution=512, beats a file.")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win over it.")
    group.add_argument("--preset", metavar="NAME", help="Recipe of the package; a file wins over it.")
    group.add_argument("--print_config", action="store_true", help="Show all settings and their origins, and end.")
    group.add_argument(
        "--dry_run", action="store_true", help="Check all, show networks, parameters and memory of weights, and end."
    )
    group.add_argument("--num_devices", type=int, default=1, metavar="N", help="Devices that --dry_run reckons with.")
    group.add_argument("--json", action="store_true", help="With --dry_run: as JSON, for scripts.")
    group.add_argument("--list_presets", action="store_true", help="Show the names of the presets, and end.")


def split_sources(argv: list[str]) -> Sources:
    """Read what the words name. Ends the program where presets are to be listed. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_source_flags(parser)
    given, rest = parse_known(parser, argv)
    if given.list_presets:
        width = max(map(len, list_presets()))
        sys.stdout.write("".join(f"{name:<{width}}  {what}\n" for name, what in list_presets().items()))
        raise SystemExit(0)
    layers = preset_layers(given.preset) if given.preset else []
    layers += file_layers(given.config) if given.config else []
    overrides = [word for word in rest if _OVERRIDE.match(word)]
    return Sources(layers, overrides, [word for word in rest if word not in overrides], given.print_config)


def read_dry_run(argv: list[str]) -> tuple[int, bool] | None:
    """(devices that `--dry_run` is to reckon with, whether it answers as JSON); None where it is not asked for. Raises
    ConfigError."""
    parser = argparse.ArgumentParser(add_help=False)
    add_source_flags(parser)
    given, _ = parse_known(parser, argv)
    if given.num_devices < 1:
        raise ConfigError(f"--num_devices {given.num_devices} must be 1 or more")
    if given.json and not given.dry_run:
        raise ConfigError("--json is for --dry_run; omit it, or add --dry_run")
    return (given.num_devices, given.json) if given.dry_run else None
