"""A text-to-image training run from its flags."""

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from ..config.arguments import DEFAULT_TOKENIZER, DataArguments, ModelArguments
from ..data.dataset import TextImageDataset
from ..data.order import Mix
from ..data.text.tokenizer import load_tokenizer
from ..families.build import build_ldm, describe_ldm, latent_shape
from ..inference.export import export_pipeline
from ..inference.generate import read_prompts
from ..inference.grid import prompt_grid, tile
from ..inference.guided import draw, sample_latents, to_pictures
from ..networks.ema import ExponentialMovingAverage, GradualDecay, IntervalDecay
from ..utils.errors import ConfigError
from ..utils.log import get_logger, progress
from ..utils.world import World
from ..weights.fetch import locate_model
from ..weights.model_file import TokenizerFiles
from ..weights.read import PART_FOLDERS, find_tokenizer
from .arguments import LDMTrainingArguments
from .checkpoint.checkpoint import TrainingState
from .checkpoint.resume import restore
from .compiled import CompiledPrediction
from .distributed.detect import detect_world
from .identity import resolved_config, run_identity
from .monitor.captions import first_caption, report_captions
from .monitor.interval_metrics import IntervalMetrics, gather_objects
from .monitor.validation import (
    gather_in_order,
    open_held_out_sources,
    select_held_out,
    shard,
    undisturbed,
    validation_loss,
)
from .optimizer.optim import build_optimizer
from .optimizer.precision import autocast, decorate, make_scaler, warn_of_cpu
from .optimizer.sharding import log_share
from .rows import bad_row_policy, count_steps, open_sources, select_training_rows
from .run import TrainingRun
from .run_folder import prepare_output

NUM_PICTURES = 8  # of the batch, as published, or at a time
# Settings that the loss depends on.
_MODEL_SETTINGS = (
    *("prediction_type", "noise_offset", "input_perturbation", "snr_gamma", "rescale_betas_zero_snr"),
    *("freeze_text_encoder", "model_max_length"),
)
PIPELINE_DIR = "pipeline"


def prepare_text_to_image(
    model_arguments: ModelArguments, data_arguments: DataArguments, arguments: LDMTrainingArguments
) -> TrainingRun:
    """Everything between the flags and the first update. Raises a PpldmError for whatever cannot work."""
    sources = open_sources(data_arguments)
    held_out_sources = open_held_out_sources(data_arguments, sources)
    prompts = read_validation_prompts(arguments.validation_prompts or [])
    world = detect_world(arguments)
    warn_of_cpu(arguments)
    config = resolved_config(model_arguments, data_arguments, arguments)
    checkpoint = prepare_output(arguments, world, config)
    selection = select_training_rows(sources, data_arguments, arguments, world)
    tokenizer = load_tokenizer(
        tokenizer_source(model_arguments), model_arguments.model_max_length, model_arguments.offline
    )
    model = build_ldm(model_arguments, tokenizer.vocab_size, arguments.seed)
    description = describe_ldm(model, files_of(tokenizer))
    if arguments.recompute:
        model.unet.enable_gradient_checkpointing()
        if not model.freeze_text_encoder:
            model.text_encoder.model.gradient_checkpointing = True
    if arguments.to_static:
        model.compiled_predict = CompiledPrediction(model, world)
    make_dataset = partial(
        TextImageDataset,
        tokenizer=tokenizer,
        resolution=data_arguments.resolution,
        latent_shape=latent_shape(model.vae, data_arguments.resolution),
        seed=arguments.seed,
        crop_fraction=data_arguments.crop_fraction,
        num_train_timesteps=model.noise_schedule.num_train_timesteps,
        noise_offset=model_arguments.noise_offset,
        input_perturbation=model_arguments.input_perturbation,
        bad_rows=bad_row_policy(data_arguments),
        interpolation=data_arguments.interpolation,
    )
    dataset = make_dataset(
        sources,
        caption_drop_probability=data_arguments.caption_drop,
        random_crop=data_arguments.random_crop,
        random_flip=data_arguments.random_flip,
        selection=selection,
    )
    if world.is_main:
        report_captions(dataset)
    mix = Mix(dataset.list_sizes, dataset.weights, arguments.seed)
    global_batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    max_steps = count_steps(arguments, len(dataset), global_batch_size)
    trained = model.trained_parameters()
    decay = ema_decay(model_arguments)
    ema = ExponentialMovingAverage(trained, decay) if decay else None
    optimizer, scheduler = build_optimizer(trained, arguments, max_steps, global_batch_size, world)
    decorate(model, optimizer, arguments)
    log_share(optimizer)
    state = TrainingState(model, optimizer, scheduler, ema, make_scaler(arguments))
    identity = run_identity(arguments, data_arguments, dataset, global_batch_size, max_steps)
    identity |= {name: getattr(model_arguments, name) for name in _MODEL_SETTINGS}
    identity |= {"caption_drop": data_arguments.caption_drop, "ema": str(decay)}
    start_step, unlogged = restore(
        checkpoint, state, identity, description, dataset.fingerprint, arguments.accept_changes
    )
    get_logger().info("%d rows, %d updates of %d samples, %.1f M trained parameters",
                      len(dataset), max_steps, global_batch_size,
                      sum(np.prod(p.shape) for p in trained.values()) / 1e6)  # fmt: skip

    def draw_samples(batch: dict) -> tuple[dict, dict]:
        make = partial(
            draw_sample_pictures,
            scales=arguments.validation_guidance_scales,
            num_inference_steps=model_arguments.num_inference_steps,
        )
        with autocast(arguments)():
            return make(state, tokenizer, prompts, batch, seed=arguments.seed, world=world), {}

    held_out = select_held_out(held_out_sources, dataset, make_dataset, data_arguments, arguments, world)

    def export(metadata: dict) -> Path:
        folder = Path(arguments.output_dir, PIPELINE_DIR)
        metadata |= {
            "model_max_length": model_arguments.model_max_length,
            "example_prompt": prompts[0] if prompts else first_caption(dataset),
        }
        export_pipeline(model, tokenizer, folder, ema, metadata)
        return folder

    return TrainingRun(
        arguments=arguments,
        world=world,
        state=state,
        dataset=dataset,
        mix=mix,
        max_steps=max_steps,
        global_batch_size=global_batch_size,
        identity=identity,
        config=config,
        description=description,
        checkpoint=checkpoint,
        start_step=start_step,
        interval=IntervalMetrics(
            world, model.noise_schedule.num_train_timesteps, unlogged, data_arguments.max_skipped_share
        ),
        draw_every=model_arguments.image_logging_steps,
        draw=draw_samples,
        export=export,
        validate=held_out and partial(validation_loss, state, held_out, world, autocast(arguments)),
    )


def draw_sample_pictures(
    state: TrainingState,
    tokenizer,
    prompts: list[str],
    batch: dict,
    scales: list[float],
    num_inference_steps: int,
    seed: int,
    world: World,
) -> dict:
    """Pictures by tag on the main process: originals over their reconstructions, and DDIM samples of each scale.

    Samples of `prompts`, each from the noise that (seed, prompt) gives it; without any, of the captions and noises of
    the first NUM_PICTURES samples of the ranks' batches. The ranks share the work; a collective call.
    """
    model = state.model
    own = {name: batch[name][: len(shard(NUM_PICTURES, world))] for name in model.input_names}
    my_prompts = [prompts[number] for number in shard(len(prompts), world)]
    chunks = [my_prompts[start : start + NUM_PICTURES] for start in range(0, len(my_prompts), NUM_PICTURES)]
    shape, empty = tuple(batch["noise"].shape[1:]), paddle.to_tensor(tokenizer.encode([""]))
    bar = progress(
        total=len(scales) * num_inference_steps * (len(chunks) if prompts else 1),
        desc="drawing samples",
        unit="step",
        delay=5,
        disable=not world.is_main,
    )
    captions = my_prompts if prompts else tokenizer.decode(own["input_ids"].numpy())
    found = {"captions": captions, "reconstruction": []} | {f"ddim-samples-{scale}": [] for scale in scales}
    with undisturbed(state), bar:
        settings = {"num_inference_steps": num_inference_steps, "on_step": bar.update}
        if len(own["noise"]):
            originals = own["pixel_values"].transpose([0, 2, 3, 1]).numpy()
            decoded = to_pictures(model.decode(model.encode(own["pixel_values"], own["posterior_noise"])))
            found["reconstruction"] = list(zip(originals, decoded, strict=True))
        for scale in scales:
            pictures = found[f"ddim-samples-{scale}"]
            for chunk in chunks:
                indices = [0] * len(chunk)
                pictures += list(draw(model, tokenizer, chunk, indices, shape, seed, scale, **settings, check=False))
            if not prompts and len(own["noise"]):
                latents = sample_latents(model, own["input_ids"], empty, own["noise"], scale, **settings)
                pictures += list(to_pictures(model.decode(latents)))
    gathered = gather_objects(found, world)
    if not world.is_main:
        return {}
    drawn = {tag: gather_in_order([one[tag] for one in gathered]) for tag in found}
    captions, pairs = drawn.pop("captions"), drawn.pop("reconstruction")
    both = np.stack([original for original, _ in pairs] + [decoded for _, decoded in pairs])
    samples = {
        tag: np.asarray(prompt_grid(captions, [[picture] for picture in row], columns=NUM_PICTURES))
        for tag, row in drawn.items()
    }
    return {"reconstruction": tile(both, len(pairs))} | samples


def read_validation_prompts(values: list[str]) -> list[str]:
    """The prompts of the files among `values`, and the other values themselves. Raises ConfigError."""
    prompts = []
    for value in values:
        if os.path.isfile(value) or value.endswith(".txt"):
            prompts += [prompt for prompt, _ in read_prompts(value)]
        else:
            prompts.append(value)
    return prompts


def ema_decay(arguments: ModelArguments) -> GradualDecay | IntervalDecay | None:
    """The form of the average that the flags ask for; None for no average."""
    if arguments.averages_at_intervals:
        given = {
            "start_iters": arguments.ema_start_iters, "iters": arguments.ema_iters, "beta": arguments.ema_beta
        }  # fmt: skip
        return IntervalDecay(**{name: value for name, value in given.items() if value is not None})
    return GradualDecay(arguments.ema_decay) if arguments.use_ema else None


def files_of(tokenizer) -> TokenizerFiles:
    """The files of a tokenizer as they are now, whatever becomes of the folder that it was read from."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return TokenizerFiles(
            tokenizer.max_length, {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        )


def tokenizer_source(arguments: ModelArguments) -> str:
    """`--tokenizer_name`, else that of the model to start from, else bert-base-uncased."""
    if arguments.tokenizer_name:
        return arguments.tokenizer_name
    if arguments.pretrained_text_encoder_name:
        folder = locate_model(
            arguments.pretrained_text_encoder_name, {"text_encoder": ("text_encoder",)}, arguments.offline
        )
        own = find_tokenizer(folder)
        if own is None:
            raise ConfigError(
                f"{folder} has no tokenizer (merges.txt, vocab.json) in or beside it; name its folder: --tokenizer_name"
            )
        return str(own)
    if arguments.starts_from_pipeline:
        own = find_tokenizer(locate_model(arguments.model_name_or_path, PART_FOLDERS, arguments.offline))
        if own:
            return str(own)
    return DEFAULT_TOKENIZER
