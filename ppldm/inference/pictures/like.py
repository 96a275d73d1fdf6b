"""`--like PICTURE`: what a picture of ours says of how it was drawn, in place of flags that are left out.

The picture that is drawn is the same to the bit where nothing else is asked for, on the same machine with as many
threads: it is drawn in a batch of the same size and at the same place in it, beside copies of itself.

Pictures come from strangers: what one says is checked by the table by which `ppldm serve` checks requests, and an
address in it is shown and never asked.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...utils.errors import ConfigError
from ...utils.log import get_logger
from .plan import AXES, SCALE, Plan, axis_of, flag_of

_SIDES = ("size", "resolution", "height", "width")
_OF_PICTURE = ("negative_prompt", "control_scale", "prompt_syntax", "engine", "dtype", *AXES)
OF_MODEL = ("ema", "original_config_file", "decoder", "controlnet", "tokenizer", "prediction_type",
            "rescale_betas_zero_snr")  # fmt: skip
# Pictures that are not in the file.
_GIVEN = {"control": "after a control image", "image": "over another picture", "mask": "through a mask"}
_CHANGES = ("prompts", "num_samples", "grid", "wildcards", "batch_size")
_NEEDED = ("prompt", "negative_prompt", "index", "seed", "sampler", "num_inference_steps", "guidance_scale", "height",
           "width")  # fmt: skip
_MOST_NAMES, _LONGEST_NAME = 64, 1024  # of files that a picture names, and letters of one
_BYTES = re.compile("[\udc80-\udcff]")  # those of a file's name that are not UTF-8
_LARGEST_BATCH = 256
_PIXELS = 1 << 20  # of a picture that one of fewer pixels may ask for
_PICTURES = 8  # so large, that its batch may have: `ppldm generate` draws as many by default


def like(asked) -> tuple[tuple[int, int] | None, int]:
    """Completes flags by the picture that `asked.like` names; (its batch's size and its place there, where it is drawn
    again as it is; its index). Raises ConfigError."""
    path = Path(asked.like)
    if not path.is_file():
        raise ConfigError(f"--like {path}: there is no such file; give a picture that ppldm has drawn")
    record, source = _read(path, asked)
    for name, words in _GIVEN.items():
        if name in record and getattr(asked, name) is None:
            raise ConfigError(f"--like {path} was drawn {words}; give it too: --{name} PICTURE")
    sides = any(getattr(asked, name) is not None for name in _SIDES)
    changed = (
        sides
        or bool(asked.prompt or asked.lora)
        or any(getattr(asked, name) is not None for name in (*_OF_PICTURE, *_CHANGES))
    )
    asked.drawn = record
    asked.prompt = asked.prompt or ([] if asked.prompts else [record["prompt"]])
    for name in {*_OF_PICTURE} - {axis_of(word) for word in asked.grid or ()}:
        _complete(asked, name, [record[SCALE]] if name == SCALE else record.get(name))
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
    return None if changed or asked.exact or batch is None else batch, record["index"]


def _read(path: Path, asked) -> tuple[dict, dict]:
    """(what a picture says of its drawing, of the model that drew it), checked, but for what flags say. Raises
    ConfigError."""
    from PIL import Image

    from .draw import SOURCE, read_settings

    record = read_settings(path)
    if record is None or any(record.get(name) is None for name in _NEEDED):
        raise ConfigError(
            f"--like {path} does not say how it was drawn; give a PNG file that ppldm generate has written"
        )
    flags = (*_OF_PICTURE, "lora", "height", "width")
    given = {name for name in flags if getattr(asked, name) not in (None, [])}
    given |= {"prompt"} if asked.prompt or asked.prompts else set()
    given |= {"height", "width"} if any(getattr(asked, name) is not None for name in _SIDES) else set()
    table, source, found = _table(), record.get(SOURCE) or {}, {name: record[name] for name in _NEEDED}
    try:
        for name in (record.keys() & table.keys()) - given:
            try:
                found[name] = table[name].check(record[name])
            except ConfigError as error:
                flag = f"{flag_of(name)}, or " if name in (*flags, "prompt") else ""
                raise ConfigError(f"{error}; give {flag}another picture") from error
        if "lora" not in given and (names := record.get("lora")):
            if not isinstance(names, list) or len(names) > _MOST_NAMES:
                raise ConfigError("lora is not a short list of files; give --lora")
            found["lora"] = [_check_name("lora", name) for name in names]
        if not isinstance(source, dict):
            raise ConfigError("source is not an object; give another picture")
        if asked.model is None:
            source = source | {name: _check_name(name, source[name]) for name in ("model", *OF_MODEL)
                               if source.get(name) and not (name != "model" and getattr(asked, name))}  # fmt: skip
        if not given & {"height", "width"}:
            with Image.open(path) as picture:
                pixels = max(_PIXELS, picture.width * picture.height)
            batch = source.get("batch") if asked.batch_size is None else None
            source = {**source, "batch": _check_size(found["height"] * found["width"], batch, pixels)}
    except ConfigError as error:
        raise ConfigError(f"--like {path}: what it says of itself cannot be used: {error}") from error
    return found, source


def _table() -> dict[str, Any]:
    """What a picture's record may say, by name: as a request, and what a request cannot."""
    from ...networks.engine import ENGINES
    from ..half import DTYPES
    from ..prompt_weights import SYNTAXES
    from ..serving.parameters import Limits, Parameter, make_parameters

    usual = {one.name: one for one in make_parameters(("",), Limits(max_side=1 << 14, max_steps=1 << 20))}
    for name in ("model", "image", "mask", "num_samples"):
        del usual[name]
    usual["guidance_scale"] = replace(usual["guidance_scale"], low=-1e6, high=1e6)
    own = (
        Parameter("index", "integer", "", low=0, high=2**31 - 1),
        Parameter("control_scale", "number", "", low=-1e6, high=1e6),
        Parameter("prompt_syntax", "choice", "", choices=SYNTAXES),
        Parameter("engine", "choice", "", choices=ENGINES),
        Parameter("dtype", "choice", "", choices=DTYPES),
        Parameter("exact", "flag", "", default=False),
        *(Parameter(name, "text", "") for name in ("weights", "control", "image", "mask")),
    )
    return usual | {one.name: one for one in own}


def _check_name(name: str, value) -> Any:
    """The name of a file, folder or model that a picture has of its model. Raises ConfigError."""
    from ..serving.parameters import cut

    if name == "ema" and value is True:
        return value
    if not isinstance(value, str) or not _BYTES.sub("", value).isprintable() or len(value) > _LONGEST_NAME:
        raise ConfigError(f"{name} {cut(value)} is not a name; give --{name}")
    if "://" in value:
        raise ConfigError(f"{name} is {cut(value)}, an address that a picture names is not asked; give --{name}")
    return value


def _check_size(own: int, batch, pixels: int) -> tuple[int, int] | None:
    """The batch that a picture of `own` pixels was drawn in, and its place there, as a pair. Raises ConfigError where
    either is larger than a file's of `pixels` may be."""
    if own > pixels:
        raise ConfigError(f"{own:,} pixels are far more than its own; give --size")
    if batch is None:
        return None
    whole = isinstance(batch, list) and len(batch) == 2 and all(type(one) is int for one in batch)
    if not whole or not 0 <= batch[1] < batch[0] <= min(_LARGEST_BATCH, _PICTURES * pixels // own):
        raise ConfigError("its batch and its place there are not such as to be drawn again; give --batch-size")
    return batch[0], batch[1]


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
