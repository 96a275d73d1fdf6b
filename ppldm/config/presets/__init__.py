"""Recipes that come with the package, one YAML file each; the comment on its first line describes it."""

from pathlib import Path

from ...utils.errors import ConfigError
from ...utils.text import did_you_mean

PRESETS_DIR = Path(__file__).parent


def list_presets() -> dict[str, str]:
    """The description of each preset, in one line, by name."""
    paths = sorted(PRESETS_DIR.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}


def preset_path(name: str) -> Path:
    """The file of a preset. Raises ConfigError with the nearest name."""
    if name not in list_presets():
        raise ConfigError(f"--preset {name} is not known; {did_you_mean(name, list_presets())}")
    return PRESETS_DIR / f"{name}.yaml"
