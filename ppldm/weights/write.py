"""`Weights` as a folder that ppdiffusers, diffusers or CompVis' code loads. Written whole or not at all.

ppdiffusers    model_index.json, config.json and model_state.pdparams of each component, scheduler/, tokenizer/
diffusers      the same folders with PyTorch's names and orientation, in safetensors
CompVis        model.ckpt and model.yaml, tokenizer/

Beside them model.json (`model_file`), ppldm.json (what trained it, and checksums) and README.md (the model card).
"""

import json
import shlex
from dataclasses import fields, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..config.network_files import beside, mends_text, pieces_file, write_mends
from ..diffusion.drawing import USUAL
from ..diffusion.process import FLOW_SAMPLE, FLOWS, PUBLISHED_SAMPLING, NoiseSchedule, Process, sampling_settings
from ..networks.configs import (
    CLIPS,
    TEXT_ENCODERS,
    downscale_factor,
    is_ldmbert,
    is_pixels,
    is_sd3,
    is_sdxl,
    is_shifted,
    is_t5,
    takes_mask,
    takes_sizes,
)
from ..utils.checksums import checksum_file
from ..utils.errors import ModelError
from ..utils.files import atomic_dir, read_small, write_json, write_text
from .components import ComponentWeights, Weights, cast, require_finite, to_torch, to_torch_config
from .configs import FLOW_CLASS, SCHEDULER_CLASS, ZEROS_IF_EMPTY
from .folders import EXPORTED_FILE, FURTHER_FOLDERS, FURTHER_TEXT_ENCODERS, whole_model
from .formats.files import write_safetensors
from .formats.paddle_files import write_tree
from .formats.torch_files import write_torch
from .layouts import compvis
from .layouts.published import MICRODIT_CLASS, STAGES, with_tables
from .model_file import (
    CONTROLNET,
    LDM,
    MODEL_FILE,
    TOKENIZER_FOLDER,
    TRANSFORMER,
    Component,
    TokenizerFiles,
    class_of,
    describe,
    family_of,
    kind_of,
    read_tokenizer_files,
)

DIFFUSERS_TEXT_LENGTH = 77  # of its LDMTextToImagePipeline, whatever the tokenizer says
_TORCH_CLASSES = {"Transformer2DModel": "PixArtTransformer2DModel", "MicroDiT": MICRODIT_CLASS}
T5_LENGTH = 120  # tokens of a caption where nothing says it: PixArt-alpha's, arXiv:2310.00426
DIFFUSERS_VERSION = "0.31.0"  # whose layout this is
_SEVERAL_TEXTS = ("sd3", "sdxl")  # families, and their layouts in a single file
_ONLY_HERE = ("uvit", "single_stream")  # transformers that diffusers has no class of
_LDM_FOLDERS = {"vae": "vqvae", "text_encoder": "bert"}  # beside an LDMBert; all others have their component's name
_TOKENIZER_FILES = (
    "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json",
    "words.txt", "spiece.model",
)  # fmt: skip
_MODEL_TYPES = {"LDMBertModel": "ldmbert", "T5EncoderModel": "t5"}  # of encoders of captions; else CLIP's
# By stage of Stable Cascade: the class of diffusers' pipeline, with what else it has besides scheduler and tokenizer.
_CASCADE_PIPELINES: dict[str, tuple[str, dict]] = {
    "cascade_prior": ("StableCascadePriorPipeline", {"feature_extractor": [None, None], "image_encoder": [None, None]}),
    "cascade_decoder": ("StableCascadeDecoderPipeline", {"latent_dim_scale": 10.67}),
}
# Where diffusers looks for the classes that are not its own at the top.
_LIBRARIES = {"vqgan": "wuerstchen", "projected_text_encoder": "transformers", "image_encoder": "transformers"}

# What of a scheduler's settings is the process that the model was trained under; the others say how to sample.
PROCESS_KEYS = (*(one.name for one in fields(NoiseSchedule)), "prediction_type")


def write_weights(weights: Weights, form: str, folder, dtype: str = "float32", safetensors: bool = False) -> None:
    """Write `folder` for ppdiffusers, diffusers or compvis, in a `dtype`; `safetensors` instead of .pdparams. Raises
    ModelError where components are missing or the form has no place for this model."""
    missing = [kind for kind in reversed(whole_model(weights.components)) if kind not in weights.components]
    if missing:
        raise ModelError(f"there is no {' and no '.join(missing)} to export; a whole model is needed")
    family, third = family_of(weights.components), _is_third(weights)
    only_here = form == "compvis" or (form == "diffusers" and family.name in _ONLY_HERE)
    if TRANSFORMER in weights.components and not third and only_here:
        raise ModelError(f"{form} has no network of this transformer's kind; export it to ppdiffusers")
    if form != "ppdiffusers" and _is_known_here(weights):
        raise ModelError(f"{form} draws no pixels without a VAE, nor flow by x-prediction; export it to ppdiffusers")
    if form == "compvis" and family.name not in (LDM, *_SEVERAL_TEXTS):
        what = "ControlNet" if family.name == CONTROLNET else "CLIP text encoder"
        raise ModelError(f"a model with a {what} is not written for CompVis; export it to diffusers")
    components = {kind: replace(one, arrays=cast(one.arrays, dtype)) for kind, one in weights.components.items()}
    if "unet" in components and (side := _drawn_size(weights)):
        components["unet"].config = {**components["unet"].config, "sample_size": side}
    weights = replace(weights, components=components)
    with atomic_dir(folder) as target:
        copy_tokenizer(weights.tokenizer, target / TOKENIZER_FOLDER, set(components) & {*FURTHER_TEXT_ENCODERS})
        if form == "compvis":
            for kind, component in weights.components.items():
                require_finite(component.arrays, component.source or kind)
        if form == "compvis" and family.name in _SEVERAL_TEXTS:
            layout = import_module(f".layouts.{family.name}", __package__)
            write_safetensors(target / EXPORTED_FILE, layout.join(weights), "pt")
        elif form == "compvis":
            numbers = {"global_step": int(weights.metadata.get("global_step", 0))}
            params = compvis.params_of(weights)
            write_torch(target / "model.ckpt", compvis.join(weights), numbers)
            write_text(target / "model.yaml", compvis.yaml_text(params))
        else:
            _write_pipeline(weights, target, form, safetensors)
        described = {kind: Component(one.config, kind not in weights.frozen) for kind, one in components.items()}
        process = {name: weights.scheduler[name] for name in PROCESS_KEYS if name in weights.scheduler}
        found = read_tokenizer_files(target, metadata_of(weights)["model_max_length"])
        describe(family.name, described, process, found if found.files else None).write(target)
        files = [*target.glob("*/*.pdparams"), *target.glob("*/*.safetensors"), target / MODEL_FILE]
        checksums = {str(file.relative_to(target)): checksum_file(file) for file in sorted(files)}
        write_json(target / "ppldm.json", {**metadata_of(weights), "files": checksums})
        write_text(target / "README.md", model_card(weights, form, dtype))


def _is_known_here(weights: Weights) -> bool:
    """Whether only ppldm knows what is diffused, or what is predicted."""
    return is_pixels(weights.components["vae"].config) or weights.scheduler["prediction_type"] == FLOW_SAMPLE


def _drawn_size(weights: Weights) -> int:
    """The side of latents that libraries draw by default: the UNet's in training; 0 where that is not one number."""
    size, resolution = weights.components["unet"].config.get("sample_size"), metadata_of(weights)["resolution"]
    if not isinstance(size, int) or not isinstance(resolution, int):
        return 0
    side, rest = divmod(resolution, downscale_factor(weights.components["vae"].config))
    return 0 if rest else side


def _is_third(weights: Weights) -> bool:
    """Whether it is a Stable Diffusion 3."""
    return TRANSFORMER in weights.components and is_sd3(weights.components[TRANSFORMER].config)


def metadata_of(weights: Weights) -> dict:
    """What ppldm.json says: what is known of the training, and how to sample."""
    vae, text_encoder, denoiser = (weights.components[kind].config for kind in whole_model(weights.components))
    length = DIFFUSERS_TEXT_LENGTH if _is_third(weights) else T5_LENGTH
    size = denoiser["sample_size"] or vae["sample_size"] // downscale_factor(vae)
    side = size if isinstance(size, int) else size[0]
    return {
        "resolution": side * downscale_factor(vae),
        "model_max_length": text_encoder.get("max_position_embeddings", length),
        # As a PixArt-alpha, if not said.
        "mask_pad_tokens": TRANSFORMER in weights.components and is_t5(text_encoder) and not _is_third(weights),
        "empty_caption": "zeros" if is_sdxl(denoiser) else "embedding",  # as its pipeline, if not said
        "guidance_scale": USUAL.guidance_scale,
        **({"size_conditioning": True} if takes_sizes(denoiser) else {}),
        **weights.metadata,
        "prediction_type": weights.scheduler["prediction_type"],
        "scaling_factor": vae["scaling_factor"],
    }


def why_drawn_by_ppldm(weights: Weights, form: str) -> str:
    """Why the code that a form is for does not draw with an export of this model as ppldm does; "" where it does."""
    metadata, ldmbert, third = metadata_of(weights), _has_ldmbert(weights), _is_third(weights)
    if metadata["prediction_type"] in FLOWS and not third:
        return f"the text-to-image pipelines of {form} for this network do not draw rectified flow"
    t5 = is_t5(weights.components[whole_model(weights.components)[1]].config) and not third
    if t5 and family_of(weights.components).name == "dit":
        return f"the PixArt pipelines of {form} change captions before they encode them"
    if metadata["mask_pad_tokens"]:
        return f"{form} attends to the padding behind captions, and this model was trained to ignore it"
    if family_of(weights.components).name == "sdxl":
        return ""
    if metadata["empty_caption"] == "zeros":
        return f"{form} guides with the embedding of an empty caption, and this model was trained with zeros"
    if third:
        return ""
    if TRANSFORMER in weights.components:
        return f"{form} has no pipeline that draws by this transformer and text encoder"
    if t5:
        return f"{form} has no pipeline of this UNet and text encoder"
    if is_shifted(weights.components["vae"].config):
        return f"the pipelines of {form} for this UNet only scale latents, and its VAE has them shifted"
    if takes_sizes(weights.components["unet"].config) and form != "compvis":  # which has no such network
        return f"the pipelines of {form} tell the UNet no sizes, and this model was trained with them"
    if ldmbert and (CONTROLNET in weights.components or _inpaints(weights)):
        kind = "that inpaints" if _inpaints(weights) else "with a ControlNet"
        return f"{form} has no pipeline of an LDMBert text encoder {kind}"
    if form == "diffusers" and ldmbert and metadata["model_max_length"] != DIFFUSERS_TEXT_LENGTH:
        return (
            f"diffusers' LDMTextToImagePipeline pads captions to {DIFFUSERS_TEXT_LENGTH} tokens, and this model was "
            f"trained with {metadata['model_max_length']}"
        )
    return ""


def _example(weights: Weights, form: str, prompt: str) -> str:
    """Lines of Python that draw `prompt` in the folder of an export, with its own library where that can."""
    quoted, scale = json.dumps(prompt, ensure_ascii=False), f"{metadata_of(weights)['guidance_scale']}"
    files = {"image": "picture.jpg", "mask": "mask.png"} if _inpaints(weights) else {}
    files |= {"control": "control.png"} if CONTROLNET in weights.components else {}
    given = "".join(f', {name}="{file}"' for name, file in files.items())
    own = (
        "import ppldm\nfrom PIL import Image\n\n"
        f'picture = ppldm.load(".").generate({quoted}, guidance_scale={scale}{given})[0, 0]\n'
        'Image.fromarray(picture).save("picture.png")'
    )
    if form == "compvis":
        return f"# model.ckpt and model.yaml are what scripts/txt2img.py of CompVis/latent-diffusion reads\n{own}"
    name = _pipeline_class(weights)
    if reason := why_drawn_by_ppldm(weights, form):
        return f"# {reason}: draw with ppldm\n{own}"
    theirs = {"control": "image", "mask": "mask_image"}  # their names of these
    given = "".join(f', {theirs.get(one, one)}=Image.open("{file}").convert("RGB")' for one, file in files.items())
    lacking = [one for one in TEXT_ENCODERS if _is_third(weights) and one not in weights.components]
    without = "".join(f", {one}=None, {one.replace('text_encoder', 'tokenizer')}=None" for one in lacking)
    return (
        f"{'from PIL import Image' + chr(10) if files else ''}"
        f'from {form} import {name}\n\npipeline = {name}.from_pretrained("."{without})\n'
        f'pipeline({quoted}{given}, guidance_scale={scale}).images[0].save("picture.png")'
    )


def model_card(weights: Weights, form: str, dtype: str) -> str:
    """README.md of an exported model: what it is, what it was trained on, how to draw with it."""
    metadata = metadata_of(weights)
    prompt = metadata.get("example_prompt") or "a red heart"
    use = _example(weights, form, prompt)
    shown = {name: value for name, value in metadata.items() if value is not None and name != "example_prompt"}
    rows = "\n".join(f"| {name} | {value} |" for name, value in shown.items())
    configs = "\n\n".join(
        f"`{kind}`\n\n```json\n{json.dumps(component.config, indent=2)}\n```"
        for kind, component in weights.components.items()
    )
    count = sum(array.size for component in weights.components.values() for array in component.arrays.values())
    return (
        f"# A text-to-image latent diffusion model\n\nTrained with ppldm and exported for {form}: "
        f"{count / 1e6:.1f} million parameters, {dtype}.\n\n```python\n{use}\n```\n\n"
        f"`ppldm generate --model FOLDER --prompt {shlex.quote(prompt)}` draws with it too.\n\n## Training\n\n"
        f"| | |\n| --- | --- |\n{rows}\n\n## Configs\n\n{configs}\n"
    )


def _write_pipeline(weights: Weights, target: Path, form: str, safetensors: bool) -> None:
    """A ControlNet beside an LDMBert, which no library draws with, is in a folder that a pipeline does not look for."""
    ldmbert, family = _has_ldmbert(weights), family_of(weights.components)
    for name, component in weights.components.items():
        folder, kind = (_LDM_FOLDERS if ldmbert else {}).get(name, name), kind_of(family, name)
        write_component(kind, component, target / folder, form, safetensors)
    index = _index(weights, target, form)
    scheduler = FLOW_CLASS if weights.scheduler["prediction_type"] in FLOWS else "DDIMScheduler"
    write_index(target, {**index, "scheduler": [form, scheduler]}, form, scheduler_settings(weights.scheduler))


def _tokenizer_class(folder: Path) -> str:
    """By the files of its folder."""
    return TokenizerFiles(0, dict.fromkeys(path.name for path in folder.glob("*"))).class_name


def write_index(target: Path, index: dict, form: str, settings: dict) -> None:
    """model_index.json of a pipeline, and scheduler/ with the settings of the scheduler in it."""
    (target / "scheduler").mkdir()
    head = {SCHEDULER_CLASS: index["scheduler"][1], f"_{form}_version": version_of(form)}
    write_json(target / "scheduler" / "scheduler_config.json", {**head, **settings})
    write_json(target / "model_index.json", index)


def write_component(kind: str, component: ComponentWeights, folder: Path, form: str, safetensors: bool = False) -> None:
    """config.json and weights of one component in `folder`, as ppdiffusers or diffusers (`form`) loads them."""
    require_finite(component.arrays, component.source or kind)
    folder.mkdir(exist_ok=True)
    paddle_form, name = form == "ppdiffusers", class_of(kind, component.config)
    name = name if paddle_form else _TORCH_CLASSES.get(name, name)
    config = component.config if paddle_form else to_torch_config(kind, component.config, component.source)
    arrays = component.arrays if paddle_form else to_torch(component.arrays)
    if name == MICRODIT_CLASS:
        arrays = with_tables(config, arrays)
    is_encoder, library = "_encoder" in kind, "paddle" if paddle_form else "pytorch"
    file = folder / ("model.safetensors" if is_encoder else f"diffusion_{library}_model.safetensors")
    if paddle_form and not safetensors:
        write_tree(folder / "model_state.pdparams", {name: np.ascontiguousarray(a) for name, a in arrays.items()})
    else:
        write_safetensors(file, arrays, "pt" if not paddle_form else "np" if is_encoder else "pd")
    head: dict[str, Any] = {"_class_name": name, f"_{form}_version": version_of(form)}
    if is_encoder:
        clip = "clip_vision_model" if kind == "image_encoder" else "clip_text_model"
        head = {"architectures": [name], "model_type": _MODEL_TYPES.get(name, clip)}
    write_json(folder / "config.json", {**head, **config})


def _index(weights: Weights, target: Path, library: str) -> dict:
    """model_index.json of `target`, but for the scheduler, of the class that `_pipeline_class` names."""
    transformers = "ppdiffusers.transformers" if library == "ppdiffusers" else "transformers"
    index = {
        "_class_name": _pipeline_class(weights),
        f"_{library}_version": version_of(library),
        "tokenizer": [
            transformers,
            "BertTokenizer" if _has_ldmbert(weights) else _tokenizer_class(target / TOKENIZER_FOLDER),
        ],
    }
    if TRANSFORMER in weights.components:
        kind = class_of(TRANSFORMER, weights.components[TRANSFORMER].config)
        index[TRANSFORMER] = [library, kind if library == "ppdiffusers" else _TORCH_CLASSES.get(kind, kind)]
    else:
        index["unet"] = [library, "UNet2DConditionModel"]
    vae = class_of("vae", weights.components["vae"].config)
    if (family := family_of(weights.components)).name in _SEVERAL_TEXTS:
        index["vae"] = [library, vae]
        if not (third := _is_third(weights)):
            index |= {name: [None, None] for name in ("feature_extractor", "image_encoder")}
            index[ZEROS_IF_EMPTY] = metadata_of(weights)["empty_caption"] == "zeros"
        for name in TEXT_ENCODERS if third else CLIPS:
            folder, pair = beside(target / TOKENIZER_FOLDER, name), ([None, None], [None, None])
            if own := weights.components.get(name):
                words, t5 = _tokenizer_class(folder), name == "text_encoder_3" and library == "diffusers"
                pair = [transformers, class_of(kind_of(family, name), own.config)], [transformers, words + "Fast" * t5]
            index[name], index[folder.name] = pair
        return index
    if _has_ldmbert(weights):
        module = "latent_diffusion"
        if library == "ppdiffusers":
            module = "ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion"
        return {**index, "bert": [module, "LDMBertModel"], "vqvae": [library, vae]}
    return {
        **index,
        **({CONTROLNET: [library, class_of(CONTROLNET, {})]} if CONTROLNET in weights.components else {}),
        **{name: [None, None] for name in ("safety_checker", "feature_extractor", "image_encoder")},
        "requires_safety_checker": False,
        "text_encoder": [transformers, class_of("text_encoder", weights.components["text_encoder"].config)],
        "vae": [library, vae],
    }


def _pipeline_class(weights: Weights) -> str:
    if _is_third(weights):
        return "StableDiffusion3Pipeline"
    text_encoder = weights.components["text_encoder"].config
    if TRANSFORMER in weights.components or is_t5(text_encoder):  # no library has one: components are loaded singly
        return "DiffusionPipeline"
    if is_ldmbert(text_encoder):
        return "LDMTextToImagePipeline"
    kind = "Inpaint" if _inpaints(weights) else "ControlNet" if CONTROLNET in weights.components else ""
    return f"StableDiffusion{'XL' * is_sdxl(weights.components['unet'].config)}{kind}Pipeline"


def _has_ldmbert(weights: Weights) -> bool:
    return "text_encoder" in weights.components and is_ldmbert(weights.components["text_encoder"].config)


def _inpaints(weights: Weights) -> bool:
    components = weights.components
    return "unet" in components and takes_mask(components["unet"].config, components["vae"].config["latent_channels"])


def scheduler_settings(scheduler: dict) -> dict:
    """The settings of the scheduler that an exported pipeline samples with, sorted by name."""
    schedule = Process.of(scheduler).schedule
    if (kind := scheduler["prediction_type"]) in FLOWS:
        told = {"prediction_type": kind} if kind == FLOW_SAMPLE else {}
        return {"num_train_timesteps": schedule.num_train_timesteps, "shift": schedule.timestep_shift, **told}
    known = {name: scheduler[name] for name in PROCESS_KEYS if name in scheduler} | sampling_settings(scheduler)
    # A schedule that ends in pure noise is sampled from its very last timestep (arXiv:2305.08891, section 3.3).
    spacing = {"timestep_spacing": "trailing"} if scheduler.get("rescale_betas_zero_snr") else {}
    betas = {name: value for name, value in schedule.scheduler_config().items() if name == "trained_betas"}
    return dict(sorted({**PUBLISHED_SAMPLING, **spacing, **known, **betas}.items()))


def copy_tokenizer(tokenizer, target: Path, further=()) -> None:
    """The files of `Weights.tokenizer`, where there is one, in a new folder; those of `further` text encoders, where
    they lie beside it, in folders beside that."""
    if tokenizer is None:
        return
    for name in further if isinstance(tokenizer, Path) else ():
        if (own := beside(tokenizer, name)).is_dir():
            copy_tokenizer(own, beside(target, name))
    if not isinstance(tokenizer, Path):
        tokenizer.save(target)
        return
    target.mkdir()
    for path in sorted(tokenizer.iterdir()):
        if path.name in _TOKENIZER_FILES or path == pieces_file(tokenizer):
            (target / path.name).write_bytes(read_small(path, ModelError, inside=True))
    if (target / "merges.txt").is_file():
        write_mends(target, mends_text(tokenizer))  # which may follow from what lies beside it


def version_of(form: str) -> str:
    """The version of the library whose layout a pipeline of `form` has."""
    return version(form) if form == "ppdiffusers" else DIFFUSERS_VERSION


def write_cascade(
    components: dict[str, ComponentWeights],
    folder,
    tokenizer=None,
    dtype: str = "float32",
    metadata: dict | None = None,
) -> None:
    """Write `folder` as diffusers' pipeline of the prior or decoder among `components`, by kind, with a `tokenizer` (a
    folder, or what saves itself to one), and ppldm.json with `metadata` and checksums. Raises ModelError."""
    stage = next((kind for kind in STAGES if kind in components), None)
    if stage is None:
        raise ModelError("there is no prior and no decoder of Stable Cascade to export; give one of them")
    name, further = _CASCADE_PIPELINES[stage]
    head = {"_class_name": name, "_diffusers_version": version_of("diffusers")}
    index = {**head, **further, "scheduler": ["diffusers", "DDPMWuerstchenScheduler"]}
    with atomic_dir(folder) as target:
        for kind, component in components.items():
            kept = ComponentWeights(component.config, cast(component.arrays, dtype), component.source)
            (own,) = FURTHER_FOLDERS[kind]
            write_component(kind, kept, target / own, "diffusers")
            if kind != "effnet":
                index[own] = [_LIBRARIES.get(kind, "diffusers"), class_of(kind, component.config)]
        if tokenizer is not None:
            copy_tokenizer(tokenizer, target / TOKENIZER_FOLDER)
            index["tokenizer"] = ["transformers", "CLIPTokenizer"]
        write_index(target, index, "diffusers", {"s": 0.008, "scaler": 1.0})
        files = {str(file.relative_to(target)): checksum_file(file) for file in sorted(target.glob("*/*.safetensors"))}
        write_json(target / "ppldm.json", {**(metadata or {}), "files": files})
