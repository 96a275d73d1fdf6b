"""The state of PaddleMIX's training of an LDM, model_state.pdparams: the networks in one state dict, and no config.

`unet.`, `vae.` (older ones: `vqvae.`) and `text_encoder.` stand before ppdiffusers' names, and `model_ema.` before the
UNet's without their dots, for its average. Configs are the script's JSON files (unet.json, ldmbert.json, vae.json), or
folders of components, in the folder of --original_config_file or beside the file; else the published ones.
"""

import re
from pathlib import Path

from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ..components import ComponentWeights, Weights, modern_vae_name
from ..configs import PUBLISHED_SCHEDULE, check_schedule, complete_config, read_config
from ..folders import COMPONENT_FOLDERS, is_run
from ..formats.files import read_arrays, read_names
from . import compvis, single_file
from .older import modern_text_encoder, set_text_sizes

_PREFIXES = {"vae": ("vae.", "vqvae."), "text_encoder": ("text_encoder.",), "unet": ("unet.",)}
_AVERAGE = "model_ema."
_LAYER = re.compile(r"text_encoder\.(?:model|encoder)\.layers\.(\d+)\.")


def read_state(model, kinds) -> Weights:
    """The components `kinds` of such a file, a `source.ModelSource`. Raises ModelError."""
    path, names = model.path, read_names(model.path)
    if is_run(path.parent):
        raise ModelError(f"{path} is of none of the checkpoints beside it, which say what it is; give the run's folder")
    prefixes = {kind: _PREFIXES[kind] for kind in kinds if kind in _PREFIXES}
    wanted = (*(one for own in prefixes.values() for one in own), *[_AVERAGE] * model.ema)
    stored = read_arrays(path, lambda name: name.startswith(wanted) or name in single_file.TABLES)
    schedule = single_file.read_schedule(model, stored, names, PUBLISHED_SCHEDULE, described=False, second=False)
    check_schedule(schedule, path)
    weights = Weights({}, schedule, model.tokenizer)
    for kind, starts in prefixes.items():
        own = {re.sub(r"^\w+\.", "", name): array for name, array in stored.items() if name.startswith(starts)}
        if kind == "unet" and model.ema:
            own = compvis.averaged(own, stored, _AVERAGE, path)
        if own:
            config, source = _config(kind, model, names)
            arrays = {modern_vae_name(name) if kind == "vae" else name: array for name, array in own.items()}
            if "embeddings.word_embeddings.weight" in own:
                arrays = modern_text_encoder(own, config, source)
            set_text_sizes(kind, config, arrays)
            weights.components[kind] = ComponentWeights(config, arrays, source)
    if not weights.components:
        what = ", ".join(wanted)
        raise ModelError(f"{path} holds none of {what}: for one network, give the folder that its config.json is in")
    return weights


def _config(kind: str, model, names: set[str]) -> tuple[dict, str]:
    """(the completed config of a component, what messages call its weights)."""
    path = model.path
    folder = Path(model.config_file).expanduser() if model.config_file else path.parent
    for name in COMPONENT_FOLDERS[kind]:
        if (file := folder / f"{name}.json").is_file():
            return complete_config(kind, read_json_object(file, ModelError), file), str(path)
        if (folder / name).is_dir():
            return read_config(kind, folder / name), str(path)
    depth = len({found[1] for name in names if (found := _LAYER.match(name))})
    config = complete_config(kind, compvis.published_configs(depth)[kind], path)
    names_here = " or ".join(f"{name}.json" for name in COMPONENT_FOLDERS[kind])
    return config, f"{path} (no {names_here} beside it or in --original_config_file: taken for the published size)"
