"""The configs of the networks that a command line names, checked before paddle is imported: most mistakes in them are
known in a fraction of a second, and training would be minutes away from saying so."""

from pathlib import Path

from ..config.arguments import ModelArguments
from ..networks.configs import check_fit, read_new_config
from ..utils.errors import ConfigError
from ..weights.configs import CONFIG_FILES, read_config
from ..weights.model_file import has_model_file, read_model_file
from ..weights.read import PART_FOLDERS, find_part

_FLAGS = (
    *("text_encoder_config_file", "unet_config_file", "vae_name_or_path", "unet_name_or_path"),
    *("pretrained_text_encoder_name", "model_name_or_path"),
)


def check_networks(given: dict) -> None:
    """Raises ConfigError, ModelError for configs that no model can be made of: an autoencoder's where `given` has its
    `vae_config_file`, else a text-to-image model's. `given`: flags to values, None for those that are not there. Names
    and other forms of weights are left to whoever fetches and reads them."""
    if file := given.get("vae_config_file"):
        check_fit({"vae": read_new_config("vae", file, "--vae_config_file")}, file, ConfigError)
        return
    arguments = ModelArguments(**{name: given[name] for name in _FLAGS if given.get(name)})
    if arguments.starts_from_pipeline:
        folders = dict.fromkeys(PART_FOLDERS, arguments.model_name_or_path)
        files = {}
    else:
        folders = {
            "vae": arguments.vae_name_or_path,
            "text_encoder": arguments.pretrained_text_encoder_name,
            "unet": arguments.unet_name_or_path,
        }
        files = dict(zip(("text_encoder", "unet"), arguments.config_files(), strict=True))
    configs = {kind: config for kind, folder in folders.items() if folder and (config := _of_folder(kind, folder))}
    for kind, file in files.items():
        if not folders[kind]:
            table = "ldmbert" if kind == "text_encoder" else kind
            configs[kind] = read_new_config(table, file, f"--{kind}_config_file")
    check_fit(configs)


def _of_folder(kind: str, name: str) -> dict | None:
    """The config in a folder of one of the known forms, if `name` is one that holds it as JSON."""
    folder = Path(name).expanduser()
    if has_model_file(folder) and (folder / "manifest.json").is_file():
        component = read_model_file(folder).components.get(kind)
        return component and component.config
    folder = find_part(folder, kind) or folder
    return read_config(kind, folder) if any((folder / file).is_file() for file in CONFIG_FILES) else None
