"""What AUTOMATIC1111's stable-diffusion-webui, and all that reads its PNG files, finds in ours: the text `parameters`.

Three parts, each from a new line: the prompt; `Negative prompt: …`, where there is one; and fields `Name: value` with
commas between them. A value with a comma, a colon or a line break stands in quotation marks, as JSON.
(modules/processing.py, create_infotext; modules/infotext_utils.py, parse_generation_parameters; of version 1.10.)
"""

import json
from collections.abc import Mapping

CHUNK = "parameters"  # the keyword of the PNG file's text
HASH_DIGITS = 10  # of the SHA-256 of a model's file, that are shown
# Our samplers by its names (modules/sd_samplers_kdiffusion.py, sd_samplers_timesteps.py); others go by our own.
SAMPLERS = {
    "ddim": "DDIM",
    "ddpm": "DDPM",
    "pndm": "PLMS",
    "lms": "LMS",
    "heun": "Heun",
    "euler": "Euler",
    "flow-euler": "Euler",
    "euler-ancestral": "Euler a",
    "dpm-solver++": "DPM++ 2M",
    "dpm-solver++-sde": "DPM++ 2M SDE",
    "unipc": "UniPC",
}


def describe(record: Mapping, model: str, sha256: str) -> str:
    """The text of a picture, by its record (`plan.Plan.record`). model: its name; sha256: hexadecimal digits."""
    schedule, strength = record.get("sigma_schedule"), record.get("strength")
    fields = {
        "Steps": record["num_inference_steps"],
        "Sampler": SAMPLERS.get(record["sampler"], record["sampler"]),
        "Schedule type": schedule and schedule.capitalize(),
        "CFG scale": f"{record['guidance_scale']:g}",
        "Seed": record["seed"],
        "Size": f"{record['width']}x{record['height']}",
        "Model hash": sha256[:HASH_DIGITS],
        "Model": model,
        "Denoising strength": strength,
        "Eta": record.get("eta") or None,
        "CFG rescale": record.get("guidance_rescale") or None,
        "Picture": record["index"] or None,
    }
    lines = [record["prompt"]]
    if record["negative_prompt"]:
        lines.append(f"Negative prompt: {record['negative_prompt']}")
    lines.append(
        ", ".join(f"{name}: {_quoted(str(value))}" for name, value in fields.items() if value not in (None, ""))
    )
    return "\n".join(lines)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ',:\n"') else value
