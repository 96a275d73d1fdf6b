"""`ppldm generate`: pictures from prompts, and a grid of them with captions."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from ..utils.errors import ConfigError, ModelError


def generate(
    model: Annotated[str, {"opt": True, "required": True}],  # folder of an exported pipeline (training's OUT/pipeline)
    prompts: str = None,  # text file, one prompt a line; after a tab, a remark that is shown behind the prompt
    prompt: Annotated[list[str], {"nargs": "+", "type": str, "metavar": "TEXT"}] = (),  # prompts on the command line
    out: str = "pictures",  # folder to write: NNN-II.png, grid.png, pictures.jsonl
    num_samples: int = 4,  # pictures for each prompt
    guidance_scale: float = 7.5,  # how strongly to follow the prompt; 1 is no guidance
    num_inference_steps: int = 50,  # DDIM steps
    resolution: int = None,  # side in pixels; by default the one trained at
    seed: int = 23,  # the same seed and prompt give the same pictures
    batch_size: int = 8,  # pictures at a time; does not change them
    columns: int = 2,  # prompts beside one another in the grid
):
    """Draw pictures of prompts with a trained model, and a grid of them."""
    from ..utils.entry import entry

    wanted = read_wanted(prompts, list(prompt))
    _require_positive(
        num_samples=num_samples, num_inference_steps=num_inference_steps, batch_size=batch_size, columns=columns
    )
    with entry():
        draw_prompts(
            Path(model),
            wanted,
            Path(out),
            num_samples=num_samples,
            guidance_scale=guidance_scale,
            num_inference_steps=num_inference_steps,
            resolution=resolution,
            seed=seed,
            batch_size=batch_size,
            columns=columns,
        )


def read_wanted(prompts_file: str | None, prompts: list[str]) -> list[tuple[str, str]]:
    """(prompt, remark) pairs from a file and the command line. Raises ConfigError where there are none."""
    wanted = [(prompt, "") for prompt in prompts]
    if prompts_file:
        wanted += read_prompts(prompts_file)
    if not wanted:
        raise ConfigError("no prompts; give --prompt TEXT … or --prompts FILE")
    return wanted


def read_prompts(path) -> list[tuple[str, str]]:
    """(prompt, remark) pairs of a UTF-8 file: a prompt a line, its remark after a tab. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts in {path}: {error.strerror}; give a file, one prompt a line"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; write one prompt a line") from error
    pairs = [line.partition("\t") for line in lines if line.strip()]
    if not pairs:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return [(prompt.strip(), remark.strip()) for prompt, _, remark in pairs]


def draw_prompts(
    folder: Path,
    wanted: list[tuple[str, str]],
    out: Path,
    *,
    num_samples: int,
    guidance_scale: float,
    num_inference_steps: int,
    resolution: int | None,
    seed: int,
    batch_size: int,
    columns: int,
) -> None:
    """Draw `num_samples` pictures of each prompt into `out`, then the grid and a JSON line for each picture."""
    from ..data.tokenizer import load_tokenizer
    from ..models.build import latent_shape, load_pipeline
    from ..utils.files import make_output_dir, write_text
    from ..utils.log import get_logger, progress, quiet_libraries
    from ..utils.pictures import save_png
    from .grid import prompt_grid
    from .sample import draw

    facts = read_facts(folder)
    make_output_dir(out)
    quiet_libraries()
    model = load_pipeline(folder)
    tokenizer = load_tokenizer(folder / "tokenizer", facts["model_max_length"])
    shape = latent_shape(model.vae, resolution or facts["resolution"])
    jobs = [(number, index) for number in range(len(wanted)) for index in range(num_samples)]
    pictures = {}
    with progress(total=len(jobs) * num_inference_steps, desc="drawing", unit="step") as bar:
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            drawn = draw(
                model,
                tokenizer,
                [wanted[number][0] for number, _ in batch],
                [index for _, index in batch],
                shape,
                seed,
                guidance_scale,
                num_inference_steps,
                on_step=partial(bar.update, len(batch)),
            )
            for (number, index), picture in zip(batch, drawn, strict=True):
                pictures[number, index] = picture
                save_png(out / f"{number:03d}-{index:02d}.png", picture)
    settings = {"guidance_scale": guidance_scale, "num_inference_steps": num_inference_steps, "seed": seed}
    lines = [
        json.dumps({"file": f"{n:03d}-{i:02d}.png", "prompt": wanted[n][0], "index": i, **settings}, ensure_ascii=False)
        for n, i in jobs
    ]
    write_text(out / "pictures.jsonl", "".join(line + "\n" for line in lines))
    captions = [f"{prompt}  ({remark})" if remark else prompt for prompt, remark in wanted]
    rows = [[pictures[number, index] for index in range(num_samples)] for number in range(len(wanted))]
    save_png(out / "grid.png", prompt_grid(captions, rows, columns=columns))
    get_logger().info("%d pictures and grid.png in %s", len(jobs), out)


def read_facts(folder: Path) -> dict:
    """What training wrote beside an exported model. Raises ModelError."""
    try:
        facts = json.loads((folder / "ppldm.json").read_text(encoding="utf-8"))
        return {name: facts[name] for name in ("prediction_type", "resolution", "model_max_length")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder} is no exported model: no ppldm.json of one is there; give training's OUT/pipeline"
        ) from error


def _require_positive(**values) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")
