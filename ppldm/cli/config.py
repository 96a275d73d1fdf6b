"""`ppldm config`: recipes as files."""

import sys
from pathlib import Path
from typing import Annotated

from ..utils.errors import ConfigError

_Flag = Annotated[str, {"opt": True, "required": True}]


def config(
    action: Annotated[str, {"choices": ["import"]}],  # import: a config of open-diffusion or Stable Cascade
    file: str,  # the YAML file
    out: _Flag,  # recipe to write; a filelist and a UNet's config go beside it
    num_devices: int = 1,  # that the recipe is for, where the batch of all devices is given
):
    """Translate config files of other trainers to recipes, and list what has no counterpart."""
    from ..config.foreign import translate_file
    from ..config.load import Setting
    from ..config.write import write_settings
    from ..utils.files import write_text

    target = Path(out)
    if num_devices < 1:
        raise ConfigError(f"--num-devices {num_devices} must be 1 or more")
    if target.exists():
        raise ConfigError(f"--out {target} is there already; name another file, or remove it")
    found = translate_file(Path(file), num_devices, str(target.with_suffix("")))
    settings = {key: Setting(value, f"was {key_there}") for key, (value, key_there) in sorted(found.settings.items())}
    for name, text in found.files.items():
        write_text(Path(name), text)
    write_text(target, f"# Made from {file}, a config of {found.system}.\n" + write_settings(settings, origins=True))
    lines = [f"{target}: {len(settings)} settings", *(f"beside it: {name}" for name in found.files)]
    lines += ["without a counterpart:"] if found.left_out else []
    lines += [f"  {key}: {reason}" for key, reason in found.left_out.items()]
    sys.stdout.write("\n".join(lines) + "\n")
