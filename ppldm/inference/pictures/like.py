"""`--like PICTURE`: what a picture of ours says of how it was drawn, in the place of flags that are left out.

The picture that is drawn is the same to the bit where nothing else is asked for, on the same machine with as many
threads: it is drawn in a batch of the same size and at the same place in it, beside copies of itself.
"""

from pathlib import Path

from ...utils.errors import ConfigError
from ...utils.log import get_logger
from .plan import Plan

_SIDES = ("size", "resolution", "height", "width")
# The record's name of what a flag says, where that differs.
_NAMES = {"sigmas": "sigma_schedule"}
_OF_PICTURE = ("negative_prompt", "seed", "num_inference_steps", "sampler", "guidance_rescale", "eta", "strength",
               "timestep_spacing", "sigmas", "control_scale", "prompt_syntax", "engine", "dtype")  # fmt: skip
OF_MODEL = ("ema", "original_config_file", "decoder", "controlnet", "tokenizer", "prediction_type",
            "rescale_betas_zero_snr")  # fmt: skip
# Pictures that are not in the file.
_GIVEN = {"control": "after a control image", "image": "over another picture", "mask": "through a mask"}
_CHANGES = ("prompts", "num_samples", "grid", "wildcards", "batch_size")


def like(asked) -> tuple[tuple[int, int] | None, int]:
    """Completes flags by the picture that `asked.like` names; (its batch's size and its place there, where it is drawn
    again as it is; its index). Raises ConfigError."""
    from .draw import SOURCE, read_settings

    path = Path(asked.like)
    if not path.is_file():
        raise ConfigError(f"--like {path}: there is no such file; give a picture that ppldm has drawn")
    record = read_settings(path)
    if record is None or "prompt" not in record or "sampler" not in record:
        raise ConfigError(
            f"--like {path} does not say how it was drawn; give a PNG file that ppldm generate has written"
        )
    for name, words in _GIVEN.items():
        if name in record and getattr(asked, name) is None:
            raise ConfigError(f"--like {path} was drawn {words}; give it too: --{name} PICTURE")
    sides = any(getattr(asked, name) is not None for name in _SIDES)
    changed = (
        sides
        or bool(asked.prompt or asked.lora or asked.guidance_scale)
        or any(getattr(asked, name) is not None for name in (*_OF_PICTURE, *_CHANGES))
    )
    source = record.get(SOURCE, {})
    asked.drawn = record
    asked.prompt = asked.prompt or ([] if asked.prompts else [record["prompt"]])
    for name in _OF_PICTURE:
        _complete(asked, name, record.get(_NAMES.get(name, name)))
    if not asked.grid or not any(word.startswith(("guidance_scale", "guidance-scale")) for word in asked.grid):
        _complete(asked, "guidance_scale", [record["guidance_scale"]])
    for word in asked.grid or ():
        name = word.partition("=")[0].replace("-", "_")
        setattr(asked, {"steps": "num_inference_steps", "sigma_schedule": "sigmas"}.get(name, name), None)
    if not sides:
        asked.height, asked.width = record["height"], record["width"]
    asked.exact, asked.lora = asked.exact or record.get("exact", False), asked.lora or record.get("lora")
    _complete(asked, "num_samples", 1)
    if asked.model is None:
        if "model" not in source:
            raise ConfigError(f"--like {path} does not say which model has drawn it; give --model")
        asked.model = source["model"]
        for name in OF_MODEL:
            setattr(asked, name, getattr(asked, name) or source.get(name))
    batch = source.get("batch")
    return None if changed or asked.exact or batch is None else tuple(batch), record["index"]


def check_likeness(pipeline, plan: Plan, asked) -> None:
    """Say, or with `--same-weights` raise ConfigError, where the picture of `--like` was drawn by other weights, after
    another control image or over another picture."""
    if not asked.like:
        return
    for what, now in {"weights": pipeline.fingerprint, **plan.digests()}.items():
        drawn = asked.drawn.get(what, now)
        if drawn == now:
            continue
        said = f"--like {asked.like} was drawn with other {what} ({drawn} and not {now}), so the picture will differ"
        if asked.same_weights:
            raise ConfigError(f"{said}; give the {what} that it was drawn with")
        get_logger().warning("%s", said)


def _complete(asked, name: str, value) -> None:
    if getattr(asked, name) is None:
        setattr(asked, name, value)
