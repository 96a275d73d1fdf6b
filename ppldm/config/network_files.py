"""The configs of networks that come with the package, networks/*.json, and what a flag means that names one."""

from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.text import did_you_mean

CONFIG_DIR = Path(__file__).parent / "networks"


def list_network_files() -> list[str]:
    """The names of the package's configs, as flags take them: `unet_tiny`."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def find_network_file(value, flag: str = "") -> Path:
    """The file that `flag` means by `value`: the path of one, or the name of one of the package's configs.

    `examples/config/NAME.json`, where they lay before, stands for the name wherever no such file is there. Raises
    ConfigError where nothing is found.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    is_older_path = path.parts[-3:-1] == ("examples", "config") and path.suffix == ".json"
    name = path.stem if is_older_path else str(value)
    known = list_network_files()
    if name in known:
        return CONFIG_DIR / f"{name}.json"
    what = "is a folder" if path.is_dir() else "is not there"
    hint = did_you_mean(name, known, listing=False) or f"give the path of a JSON file, or one of {', '.join(known)}"
    raise ConfigError(f"{flag} {value} {what}; {hint}".lstrip())
