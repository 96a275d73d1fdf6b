"""`ppldm evaluate`: a model, a checkpoint or a folder of pictures by metrics that say all that they depend on.

The folder `--out` holds, for each guidance scale S, the pictures in gS/ and the result in gS.json; of a folder of
pictures, pictures.json. Pictures are those of `ppldm generate`: shared out over ranks and drawn once, so that the same
command goes on. The main rank measures. Features of the real pictures are kept in features/, for all scales.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated

from ..diffusion.drawing import Drawing
from ..inference.pictures.ask import GuideModel, Interval, check_settings, require_positive
from ..inference.pictures.plan import SCALE, Plan
from ..utils.entry import entry
from ..utils.errors import ConfigError
from ..utils.files import local_path
from ..utils.log import quiet_libraries
from ..utils.machine.cpu import load_paddle
from ..utils.machine.devices import use_device
from ..utils.processes.ranks import World, join_world
from ..utils.text import count_of, print_report
from ..weights.fetch import check_name
from ..weights.folders import model_in, one_run
from ..weights.lora.flag import Loras, check_loras
from .compare import show_measured

_Words = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "METRIC"}]
_Scales = Annotated[list[float], {"nargs": "+", "type": float, "metavar": "S"}]
_Seconds = Annotated[float, {"opt": True, "type": float}]


def evaluate(
    what: Annotated[str, {"opt": False, "nargs": "?"}] = None,  # pipeline, run, checkpoint, .ckpt, VAE, or pictures
    against: Annotated[str, {"opt": True, "required": True}] = None,  # real pictures: filelist, folder; or FID's .npz
    metrics: _Words = (),  # such as fid kid frechet:dinov2; by default all whose networks are at hand
    prompts: str = None,  # file of prompts, as of generate, or COCO's captions; by default the captions of --against
    num_samples: int = None,  # pictures to draw; by default one a prompt, of 1000 prompts at most
    num_real: int = None,  # real pictures to use, chosen once for all; by default all
    guidance_scale: _Scales = (),  # how strongly to follow the prompt, by default the model's. Several: a result each
    guidance_interval: Interval = None,
    cfg_zero: bool = False,  # CFG-Zero*: scale the branch without caption, and leave the first step out; for flow
    num_inference_steps: int = None,  # sampler's steps; default: the model's, or 50
    sampler: str = None,  # ddim (default), ddpm, pndm, lms, euler, euler-ancestral, dpm-solver++; flow-euler for flow
    negative_prompt: str = "",  # what the pictures should not show, for prompts without one of their own
    seed: int = 23,  # of the pictures that are drawn
    resolution: int = None,  # side in pixels of drawn and real pictures; by default as trained, or as they are
    batch_size: int = 8,  # pictures drawn at a time; changes at most the last bit of a pixel
    exact: bool = False,  # the same bits for any number of processes: one picture at a time, and one thread of a CPU
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    inception: str = None,  # InceptionV3 for FID: a file, random, or pytorch-fid, torch-fidelity, paddlenlp, paddlegan
    clip: str = None,  # CLIP: a folder, or a name such as openai/clip-vit-base-patch32
    dinov2: str = None,  # DINOv2: a file or folder, or a name such as dinov2_vitl14
    lpips: str = None,  # LPIPS for an autoencoder: a file, random, or a folder with VGG16's and the linear layers'
    convention: str = None,  # how pictures are resized for inception: clean, legacy_pytorch, legacy_tensorflow
    original_config_file: str = None,  # YAML of a .ckpt, folder of JSON of a .pdparams; of old checkpoints VAE's
    decoder: str = None,  # stage B of Stable Cascade, checkpoint or pipeline, where the model is its stage C
    guide_model: GuideModel = None,
    lora: Loras = None,
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    out: str = None,  # folder of results (default: evaluation; with --watch RUN/evaluation)
    watch: str = None,  # folder of a run: evaluate each of its checkpoints, until it has ended
    every: int = 1,  # with --watch: only checkpoints after a multiple of so many updates
    once: bool = False,  # with --watch: only what is there now
    poll_seconds: _Seconds = 10.0,  # with --watch: between looks at the folder
    threads: int = None,  # of the CPU; with --watch 1, else as many as there are cores
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    redo: bool = False,  # replace the results of other settings in --out
    dry_run: bool = False,  # say what would be drawn and measured, and do nothing
    json: bool = False,  # print the results as JSON
    offline: bool = False,  # never touch the network
):  # fmt: skip
    """Measure how good a model's pictures are (FID, CLIP score and others), with intervals and all settings."""
    flags = SimpleNamespace(**locals())
    flags.sampler = {"euler-ancest": "euler-ancestral"}.get(sampler, sampler)
    flags.lora = check_loras(lora)
    flags.drawing = Drawing(num_inference_steps, (*guidance_scale, None)[0], flags.sampler, cfg_zero=cfg_zero,
                            guidance_interval=guidance_interval)  # fmt: skip
    _check(flags)
    flags.what = what and str(model_in(local_path(what)))
    flags.watch = watch and str(one_run(watch))
    load_paddle(1 if exact else threads or (1 if flags.watch else None))  # before `job` imports it as it is
    from .job import MODEL, kind_of

    kind = MODEL if flags.watch else kind_of(local_path(flags.what))
    job = _open_job(flags, kind)
    if dry_run:
        print_report(job.plan(local_path(flags.watch or flags.what), kind), _describe_plan, json)
        return
    report = _run(job, flags, kind)
    if World.detect().is_main:
        print_report({str(path): result.as_json() for path, result in report.items()}, describe, json)


evaluate.aliases = {"--scheduler-type": "--sampler", "--guidance-scales": "--guidance-scale"}


def _check(flags) -> None:
    """Raises ConfigError for flags that say nothing, or cannot go together."""
    if (flags.what is None) == (flags.watch is None):
        raise ConfigError("name what to evaluate, a model or a folder of pictures, or the run to watch (--watch RUN)")
    if flags.seed < 0:
        raise ConfigError(f"--seed {flags.seed} must not be negative: a result must say which pictures it is of")
    for scale in flags.guidance_scale or [None]:
        check_settings(replace(flags.drawing, guidance_scale=scale), flags.seed)
    if flags.guide_model is not None:
        from ..methods.autoguidance import check_asked

        check_asked(flags.drawing, [flags.negative_prompt])
    positive = ("num_samples", "num_real", "resolution", "threads", "batch_size", "every", "poll_seconds")
    require_positive(**{name: getattr(flags, name) for name in positive if getattr(flags, name) is not None})


def _open_job(flags, kind: str):
    """What is to be done. Raises ConfigError for unknown metrics, and networks that are not given."""
    from .job import AUTOENCODER, MODEL, Job
    from .measure import Networks, choose_metrics

    networks = {name: getattr(flags, name) for name in ("inception", "clip", "dinov2", "lpips")}
    if kind != MODEL and (name := next((one for one in ("lora", "guide_model") if getattr(flags, one)), None)):
        raise ConfigError(f"--{name} changes a model that draws, and {flags.what} is none; omit it, or name the model")
    wanted, left_out = choose_metrics(flags.metrics, networks, paired=kind == AUTOENCODER)
    axes, side = {SCALE: list(dict.fromkeys(flags.guidance_scale)) or [None]}, flags.resolution
    loading = ("original_config_file", "lora", "tokenizer", "offline", "decoder", "guide_model")
    return Job(
        against=local_path(flags.against),
        wanted=wanted,
        left_out=left_out,
        make_networks=partial(Networks, networks, flags.convention, flags.device, flags.offline),
        drawn=Plan([], 0, axes, flags.drawing, flags.seed, height=side, width=side, exact=flags.exact),
        batch_size=1 if flags.exact else flags.batch_size,
        loading={name: getattr(flags, name) for name in loading},
        **{name: getattr(flags, name) for name in ("num_real", "prompts", "num_samples", "negative_prompt", "redo")},
    )


def _run(job, flags, kind: str) -> dict:
    """Results by file; paddle is loaded only where something needs it."""
    from .job import AUTOENCODER, PICTURES

    what, out = local_path(flags.watch or flags.what), local_path(flags.out or "evaluation")
    if kind == PICTURES and not World.detect().is_main:
        return {}  # nothing is drawn, and the main rank measures
    if kind == PICTURES and all(one.features in (None, "pixels") for one in job.wanted):
        return job.of_pictures(what, out)
    if not flags.watch:
        check_name(what)
    with entry(meets=True):
        use_device(flags.device)
        world = join_world()
        quiet_libraries()
        if flags.watch:
            from ..training.metrics import EVALUATION_DIR
            from .job import watch_run

            out = out if flags.out else what / EVALUATION_DIR
            return watch_run(job, what, out, flags.every, None if flags.once else flags.poll_seconds)
        if kind == AUTOENCODER:
            return job.of_autoencoder(what, out, world)
        return job.of_pictures(what, out) if kind == PICTURES else job.of_model(what, out, flags.ema, world)


def describe(report: dict) -> str:
    lines = []
    for path, result in report.items():
        settings = result["settings"]
        count, scale = settings["generated"]["count"], settings["drawn"].get("guidance_scale")
        at = f", guidance scale {scale:g}" if scale is not None else ""
        lines.append(f"{path}: {count_of(count, 'picture')} against {settings['real']['count']}{at}")
        width = max(map(len, result["metrics"]), default=0) + 2
        for name, found in result["metrics"].items():
            better = {True: "higher is better", False: "lower is better", None: ""}[found["higher_is_better"]]
            lines.append(f"  {name:<{width}}{show_measured(found):<34}{better}".rstrip())
        lines += [f"  {line}" for line in _describe_left_out(result["left_out"])]
    return "\n".join(lines)


def _describe_left_out(left_out: dict[str, str]) -> list[str]:
    """A line for each reason."""
    by_reason = {why: [name for name in left_out if left_out[name] == why] for why in left_out.values()}
    return [f"left out: {', '.join(names)} ({why})" for why, names in by_reason.items()]


def _describe_plan(plan: dict) -> str:
    known = {name: value if isinstance(value, list) else [value] for name, value in plan.items() if name != "left_out"}
    told = {name: ("the model's" if one is None else str(one) for one in values) for name, values in known.items()}
    lines = [f"{name}: {', '.join(values)}" for name, values in told.items()]
    return "\n".join(lines + _describe_left_out(plan["left_out"]))
