"""A text-to-image training run from its flags."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle

from ..config.arguments import DEFAULT_TOKENIZER, DataArguments, ModelArguments
from ..data.dataset import TextImageDataset
from ..data.order import Mix
from ..data.tokenizer import load_tokenizer
from ..inference.export import export_pipeline
from ..inference.generate import read_prompts
from ..inference.grid import tile
from ..inference.sample import draw, sample_latents, to_pictures
from ..models.build import build_ldm, latent_shape
from ..models.ema import ExponentialMovingAverage, GradualDecay, IntervalDecay
from ..utils.log import get_logger, progress
from .arguments import LDMTrainingArguments
from .checkpoint import TrainingState
from .optim import build_optimizer
from .precision import decorate, make_scaler, restore_float32, warn_of_cpu
from .run import (
    TrainingRun,
    bad_row_policy,
    count_steps,
    detect_world,
    open_sources,
    prepare_output,
    resolved_config,
    restore,
    run_identity,
    select_training_rows,
)

# The published guidance scales of the pictures drawn while training: without and with guidance.
GUIDANCE_SCALES = (1.0, 7.5)
NUM_PICTURES = 8
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
    prompts = (
        [prompt for prompt, _ in read_prompts(arguments.validation_prompts)] if arguments.validation_prompts else None
    )
    world = detect_world(arguments)
    warn_of_cpu(arguments)
    checkpoint = prepare_output(arguments, world, resolved_config(model_arguments, data_arguments, arguments))
    selection = select_training_rows(sources, data_arguments, arguments, world)
    tokenizer = load_tokenizer(tokenizer_source(model_arguments), model_arguments.model_max_length)
    model = build_ldm(model_arguments, tokenizer.vocab_size, arguments.seed)
    if arguments.recompute:
        model.unet.enable_gradient_checkpointing()
        model.text_encoder.model.gradient_checkpointing = True
    dataset = TextImageDataset(
        sources,
        tokenizer,
        data_arguments.resolution,
        latent_shape(model.vae, data_arguments.resolution),
        arguments.seed,
        caption_drop_probability=data_arguments.caption_drop,
        crop_fraction=data_arguments.crop_fraction,
        random_crop=data_arguments.random_crop,
        random_flip=data_arguments.random_flip,
        num_train_timesteps=model.noise_schedule.num_train_timesteps,
        noise_offset=model_arguments.noise_offset,
        input_perturbation=model_arguments.input_perturbation,
        bad_rows=bad_row_policy(data_arguments),
        selection=selection,
        interpolation=data_arguments.interpolation,
    )
    mix = Mix(dataset.list_sizes, dataset.weights, arguments.seed)
    global_batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    max_steps = count_steps(arguments, len(dataset), global_batch_size)
    trained = model.trained_parameters()
    decay = ema_decay(model_arguments)
    ema = ExponentialMovingAverage(trained, decay) if decay else None
    optimizer, scheduler = build_optimizer(trained, arguments, max_steps, global_batch_size)
    decorate(model, optimizer, arguments)
    state = TrainingState(model, optimizer, scheduler, ema, make_scaler(arguments))
    identity = run_identity(arguments, data_arguments, dataset, global_batch_size, max_steps)
    identity |= {name: getattr(model_arguments, name) for name in _MODEL_SETTINGS}
    identity |= {"caption_drop": data_arguments.caption_drop, "ema": str(decay)}
    start_step, unlogged_losses = restore(checkpoint, state, identity, arguments.accept_changes)
    get_logger().info("%d rows, %d updates of %d samples, %.1f M trained parameters",
                      len(dataset), max_steps, global_batch_size,
                      sum(np.prod(p.shape) for p in trained.values()) / 1e6)  # fmt: skip

    def draw_samples(batch: dict) -> tuple[dict, dict]:
        return draw_sample_pictures(
            state, tokenizer, prompts, batch, model_arguments.num_inference_steps, arguments.seed
        )

    def export(facts: dict) -> Path:
        folder = Path(arguments.output_dir, PIPELINE_DIR)
        facts = {**facts, "model_max_length": model_arguments.model_max_length}
        restore_float32(state)
        export_pipeline(model, tokenizer, folder, ema, facts)
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
        checkpoint=checkpoint,
        start_step=start_step,
        unlogged_losses=unlogged_losses,
        draw_every=model_arguments.image_logging_steps,
        draw=draw_samples,
        export=export,
    )


@paddle.no_grad()
def draw_sample_pictures(state: TrainingState, tokenizer, prompts, batch: dict, num_inference_steps: int, seed: int):
    """(pictures by tag, no numbers): the batch's reconstruction, and DDIM samples without and with guidance.

    Drawn with the averaged weights where there are any, for `prompts`, or else for the batch's own captions. Draws
    nothing from any training random state and leaves the model in training mode.
    """
    model = state.model
    model.eval()
    bar = progress(total=len(GUIDANCE_SCALES) * num_inference_steps, desc="drawing samples", unit="step", delay=5)
    with state.ema.applied() if state.ema else nullcontext(), bar:
        latents = model.encode(batch["pixel_values"][:NUM_PICTURES], batch["posterior_noise"][:NUM_PICTURES])
        pictures = {"reconstruction": _row(model.decode(latents))}
        for scale in GUIDANCE_SCALES:
            tag = f"ddim-samples-{scale}"
            if prompts:
                drawn = draw(model, tokenizer, prompts, [0] * len(prompts), tuple(latents.shape[1:]), seed, scale,
                             num_inference_steps, bar.update)  # fmt: skip
                pictures[tag] = tile(drawn, min(len(drawn), NUM_PICTURES))
            else:
                sampled = sample_latents(
                    model,
                    batch["input_ids"][:NUM_PICTURES],
                    paddle.to_tensor(tokenizer.encode([""])),
                    batch["noise"][:NUM_PICTURES],
                    scale,
                    num_inference_steps,
                    bar.update,
                )
                pictures[tag] = _row(model.decode(sampled))
    model.train()
    return pictures, {}


def ema_decay(arguments: ModelArguments) -> GradualDecay | IntervalDecay | None:
    """The form of the average that the flags ask for; None for no average."""
    if arguments.averages_at_intervals:
        given = {
            "start_iters": arguments.ema_start_iters, "iters": arguments.ema_iters, "beta": arguments.ema_beta
        }  # fmt: skip
        return IntervalDecay(**{name: value for name, value in given.items() if value is not None})
    return GradualDecay(arguments.ema_decay) if arguments.use_ema else None


def tokenizer_source(arguments: ModelArguments) -> str:
    """`--tokenizer_name`, else the pipeline's own tokenizer, else bert-base-uncased."""
    if arguments.tokenizer_name:
        return arguments.tokenizer_name
    own = Path(arguments.model_name_or_path or "").expanduser() / "tokenizer"
    return str(own) if arguments.starts_from_pipeline and own.is_dir() else DEFAULT_TOKENIZER


def _row(pixels) -> np.ndarray:
    pictures = to_pictures(pixels)
    return tile(pictures, len(pictures))
