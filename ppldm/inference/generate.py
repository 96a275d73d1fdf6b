"""`ppldm generate`: pictures from prompts, in one process or several, resumed where it stopped.

A picture that is there with the same settings and model is not drawn again; other settings replace it. Pictures of
other prompts stay: without `--out` the next free folder is taken, and a folder that is named is refused.
"""

import secrets
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated

from ..networks.engine import Dtype, Engine
from ..utils.machine.devices import use_device
from ..utils.text import print_report
from ..weights.fetch import check_name
from ..weights.lora.flag import Inversions, Loras, check_loras
from .pictures.ask import OF_MODEL, GuideModel, Interval, check_likeness, plan_of
from .pictures.draw import check_folder, describe_source, draw_plan, estimate, free_folder, write_summary
from .pictures.plan import FILES, Plan
from .prompt_weights import describe_prompts

_Scales = Annotated[list[float], {"nargs": "+", "type": float, "metavar": "S"}]
_Axes = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "SETTING=VALUE,…"}]


def generate(
    model: str = None,  # pipeline, checkpoint or run folder, single file (.safetensors, .ckpt), or a name
    prompts: str = None,  # file of prompts: text (one a line; after a tab, a remark), .tsv, .csv or .jsonl
    prompt: Annotated[list[str], {"nargs": "+", "type": str, "metavar": "TEXT"}] = (),  # prompts on the command line
    like: str = None,  # picture that ppldm has drawn: draw it again, but for what other flags say
    same_weights: bool = False,  # with --like, refuse a model of other weights than have drawn the picture
    wildcards: str = None,  # folder of lists: {a|b} in a prompt is one of both, __name__ a line of FOLDER/name.txt
    prompt_syntax: str = None,  # plain (default), or weighted: (word:1.2), (word), [word], and BREAK
    negative_prompt: str = None,  # what the pictures should not show, for prompts without one of their own
    out: str = None,  # folder to write, default: drawn, or drawn-2 … where drawn has other pictures
    num_samples: int = None,  # pictures for each prompt, 4 by default; with --like 1
    guidance_scale: _Scales = None,  # how strongly to follow the prompt, by default the model's. Several: folders gN
    num_inference_steps: int = None,  # sampler's steps; default: the model's, or 50
    sampler: str = None,  # ddim (default), euler, heun, dpm-solver++, unipc and others: docs/drawing.md
    guidance_rescale: float = None,  # how much of the contrast that guidance adds is taken back, 0 (default) to 1
    guidance_interval: Interval = None,
    cfg_zero: bool = False,  # CFG-Zero*: scale the branch without caption, and leave the first step out; for flow
    eta: float = None,  # share of fresh noise in each step of ddim, 0 (default) to 1
    timestep_spacing: str = None,  # leading, trailing or linspace; by default the model's own
    sigmas: str = None,  # karras or exponential, for samplers over sigmas; by default those of the training
    image: str = None,  # picture to draw over, its centre
    strength: float = None,  # share of the steps taken over it: 0.8 by default, with --mask 1
    mask: str = None,  # picture that is light where --image is drawn anew; the rest of it is kept
    grid: _Axes = None,  # one or two settings to compare, as sampler=ddim,euler num_inference_steps=10,20
    resolution: int = None,  # side in pixels; by default the one trained at
    height: int = None,  # in pixels, where it is not the side
    width: int = None,  # in pixels, where it is not the side
    size: str = None,  # the same as --width and --height, as 640x448
    control: str = None,  # picture that leads the drawing, for models with a ControlNet
    control_filter: str = None,  # filter to make the control image of that picture first, as canny (docs/controlnet.md)
    control_scale: float = None,  # how much of what the ControlNet adds, 1 by default
    seed: int = None,  # 23 by default; the same seed and prompt give the same pictures; -1 chooses one
    batch_size: int = None,  # pictures at a time, 8 by default; changes at most the last bit of a pixel
    exact: bool = False,  # the same bits for any number of processes: one picture at a time, and one thread of a CPU
    layout: str = "",  # geneval: folders as GenEval's evaluation reads them, 00000/samples/00000.png, …
    columns: int = 2,  # prompts beside one another in the grid
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    original_config_file: str = None,  # YAML of a .ckpt, folder of JSON of a .pdparams; of old checkpoints VAE's
    decoder: str = None,  # stage B of Stable Cascade, checkpoint or pipeline, where the model is its stage C
    controlnet: str = None,  # control network of Stable Cascade's stage C, checkpoint or folder, with --control
    guide_model: GuideModel = None,
    lora: Loras = None,
    textual_inversion: Inversions = None,
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    prediction_type: str = None,  # epsilon or v_prediction, of a Stable Diffusion 2 in one file that does not say
    rescale_betas_zero_snr: bool = False,  # it was trained to a last timestep of pure noise, and does not say so
    engine: Engine = None,
    dtype: Dtype = None,
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    offline: bool = False,  # never touch the network
    dry_run: bool = False,  # say how many pictures these are, and from a first batch how long they take
):  # fmt: skip
    """Draw pictures of prompts with a trained model, and a grid of them."""
    from ..utils.entry import entry

    plan = plan_of(asked := SimpleNamespace(**locals()))
    asked.out, asked.lora = None if out is None else check_folder(plan, out), check_loras(asked.lora)
    check_name(asked.model)
    with entry(threads=1 if asked.exact else None, meets=True):
        _draw(plan, asked)


# The flags of the published generate_images.py, as ours.
generate.aliases = {
    "--model-name-or-path": "--model",
    "--file": "--prompts",
    "--save-path": "--out",
    "--guidance-scales": "--guidance-scale",
    "--scheduler-type": "--sampler",
}


def _draw(plan: Plan, asked: SimpleNamespace) -> None:
    from ..utils.log import quiet_libraries
    from ..utils.processes.ranks import barrier, gather_objects, join_world
    from .beginning import read_beginning
    from .load import load

    use_device(asked.device)
    world = join_world()
    quiet_libraries()
    told = {name: getattr(asked, name) for name in OF_MODEL}
    files = {name: getattr(asked, name) or () for name in FILES}
    computed = {"offline": asked.offline, "engine": asked.engine, "dtype": asked.dtype}
    pipeline = load(asked.model, **files, **computed, **told)
    seed = secrets.randbelow(2**31) if plan.seed == -1 else plan.seed
    source = describe_source(asked.model, asked.offline, **told) if world.is_main else None
    seed, source = gather_objects((seed, source), world)[0]
    plan = replace(plan, seed=seed, source=source).fit(pipeline.model)
    size = plan.size(pipeline.resolution)
    pipeline.latent_shape(*size)
    if asked.control:
        plan = replace(plan, control=pipeline.read_control(asked.control, size, asked.control_filter, seed))
    if asked.image:
        plan = replace(plan, **read_beginning(asked.image, asked.mask, size))
    check_likeness(pipeline, plan, asked)
    batch_size, records = 1 if asked.exact else asked.batch_size, plan.records(pipeline)
    if asked.dry_run:
        if world.is_main:
            print_report(estimate(pipeline, plan, records, batch_size), str, as_json=False)
        return
    if world.is_main:
        texts = (one[name] for one in records.values() for name in ("prompt", "negative_prompt"))
        warn_of_prompts(pipeline, texts, plan.weighted)
    out = asked.out or gather_objects(free_folder(plan, records) if world.is_main else None, world)[0]
    draw_plan(pipeline, plan, records, out, batch_size=batch_size, world=world)
    barrier(world)
    if world.is_main:
        write_summary(plan, records, out, asked.columns)


def warn_of_prompts(pipeline, texts: Iterable[str], weighted: bool = False) -> None:
    """Say what of prompts the model does not see as they say it."""
    from ..utils.errors import as_shown
    from ..utils.log import get_logger

    if said := describe_prompts(pipeline, texts, weighted):
        get_logger().warning("%s", as_shown(said))
