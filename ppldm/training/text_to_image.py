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
from ..models.ema import ExponentialMovingAverage
from ..models.weights.fetch import local_path
from ..models.weights.read import PART_FOLDERS, find_tokenizer
from ..utils.errors import ConfigError
from ..utils.log import get_logger, progress
from .arguments import LDMTrainingArguments
from .checkpoint import TrainingState
from .optim import build_optimizer
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
    checkpoint = prepare_output(arguments, world, resolved_config(model_arguments, data_arguments, arguments))
    selection = select_training_rows(sources, data_arguments, arguments, world)
    tokenizer = load_tokenizer(
        tokenizer_source(model_arguments), model_arguments.model_max_length, model_arguments.offline
    )
    model = build_ldm(model_arguments, tokenizer.vocab_size, arguments.seed)
    if arguments.recompute:
        model.unet.enable_gradient_checkpointing()
        if not model.freeze_text_encoder:
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
        bad_rows=bad_row_policy(data_arguments),
        selection=selection,
        interpolation=data_arguments.interpolation,
    )
    mix = Mix(dataset.list_sizes, dataset.weights, arguments.seed)
    global_batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    max_steps = count_steps(arguments, len(dataset), global_batch_size)
    trained = model.trained_parameters()
    ema = ExponentialMovingAverage(trained, model_arguments.ema_decay) if model_arguments.use_ema else None
    optimizer, scheduler = build_optimizer(list(trained.values()), arguments, max_steps)
    scaler = paddle.amp.GradScaler(init_loss_scaling=arguments.scale_loss) if arguments.fp16 else None
    state = TrainingState(model, optimizer, scheduler, ema, scaler)
    identity = run_identity(arguments, data_arguments, len(dataset), global_batch_size, max_steps)
    identity["prediction_type"] = model_arguments.prediction_type
    start_step, unlogged_losses = restore(checkpoint, state, identity)
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


def tokenizer_source(arguments: ModelArguments) -> str:
    """`--tokenizer_name`, else that of the model to start from, else bert-base-uncased."""
    if arguments.tokenizer_name:
        return arguments.tokenizer_name
    if arguments.pretrained_text_encoder_name:
        folder = local_path(
            arguments.pretrained_text_encoder_name, {"text_encoder": ("text_encoder",)}, arguments.offline
        )
        own = find_tokenizer(folder)
        if own is None:
            raise ConfigError(
                f"{folder} has no tokenizer (merges.txt, vocab.json) in or beside it; name its folder: --tokenizer_name"
            )
        return str(own)
    if arguments.starts_from_pipeline:
        own = find_tokenizer(local_path(arguments.model_name_or_path, PART_FOLDERS, arguments.offline))
        if own:
            return str(own)
    return DEFAULT_TOKENIZER


def _row(pixels) -> np.ndarray:
    pictures = to_pictures(pixels)
    return tile(pictures, len(pictures))
