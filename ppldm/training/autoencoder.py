"""An autoencoder's training run from its flags: the same loop, data and checkpoints as the text-to-image run."""

from functools import partial
from pathlib import Path

import numpy as np
import paddle

from ..config.arguments import AutoencoderArguments, DataArguments
from ..data.dataset import TextImageDataset
from ..data.order import Mix
from ..families.autoencoder import AutoencoderObjective, latent_statistics, psnr, reconstruct
from ..families.build import build_autoencoder, describe_autoencoder, latent_shape, save_part
from ..inference.grid import tile
from ..inference.guided import to_pictures
from ..utils.errors import ConfigError
from ..utils.files import atomic_dir, write_json
from ..utils.log import get_logger, progress
from ..utils.world import World
from .arguments import LDMTrainingArguments
from .checkpoint.checkpoint import TrainingState
from .checkpoint.resume import restore
from .distributed.detect import detect_world
from .identity import resolved_config, run_identity
from .monitor.interval_metrics import IntervalMetrics, gather_objects
from .monitor.validation import (
    gather_in_order,
    make_batch,
    open_held_out_sources,
    select_held_out,
    shard,
    spread,
    undisturbed,
    validation_loss,
)
from .optimizer.optim import build_optimizer
from .optimizer.precision import autocast, warn_of_cpu
from .optimizer.sharding import log_share
from .rows import bad_row_policy, count_steps, open_sources, select_training_rows
from .run import TrainingRun
from .run_folder import prepare_output

VAE_DIR = "vae"
NUM_PICTURES = 16  # reconstructed for pictures and PSNR, spread evenly over the rows
NUM_MEASURED = 1024  # encoded for the latents' statistics, at most


def prepare_autoencoder(
    vae_arguments: AutoencoderArguments, data_arguments: DataArguments, arguments: LDMTrainingArguments
) -> TrainingRun:
    """Everything between the flags and the first update. Raises a PpldmError for whatever cannot work."""
    for name in ("fp16", "recompute", "to_static", "unet_learning_rate", "text_encoder_learning_rate"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is not supported for autoencoders; omit it")
    if arguments.bf16 and arguments.fp16_opt_level != "O1":
        raise ConfigError(f"--fp16_opt_level {arguments.fp16_opt_level} is not supported for autoencoders; use O1")
    sources = open_sources(data_arguments)
    held_out_sources = open_held_out_sources(data_arguments, sources)
    world = detect_world(arguments)
    warn_of_cpu(arguments)
    config = resolved_config(vae_arguments, data_arguments, arguments)
    checkpoint = prepare_output(arguments, world, config)
    selection = select_training_rows(sources, data_arguments, arguments, world)
    vae = build_autoencoder(vae_arguments.vae_config_file, arguments.seed)
    make_dataset = partial(
        TextImageDataset,
        tokenizer=None,
        resolution=data_arguments.resolution,
        latent_shape=latent_shape(vae, data_arguments.resolution),
        seed=arguments.seed,
        crop_fraction=data_arguments.crop_fraction,
        pixels_only=True,
        bad_rows=bad_row_policy(data_arguments),
        interpolation=data_arguments.interpolation,
    )
    dataset = make_dataset(
        sources,
        random_crop=data_arguments.random_crop,
        random_flip=data_arguments.random_flip,
        selection=selection,
    )
    model = AutoencoderObjective(vae, vae_arguments.reconstruction_loss, vae_arguments.kl_weight)
    global_batch_size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    max_steps = count_steps(arguments, len(dataset), global_batch_size)
    optimizer, scheduler = build_optimizer(model.trained_parameters(), arguments, max_steps, global_batch_size, world)
    log_share(optimizer)
    state = TrainingState(model, optimizer, scheduler)
    identity = run_identity(arguments, data_arguments, dataset, global_batch_size, max_steps)
    identity |= {name: getattr(vae_arguments, name) for name in ("reconstruction_loss", "kl_weight")}
    description = describe_autoencoder(vae)
    start_step, unlogged = restore(
        checkpoint, state, identity, description, dataset.fingerprint, arguments.accept_changes
    )

    def draw(_batch: dict) -> tuple[dict, dict]:
        return reconstruction_pictures(state, vae, dataset, world)

    held_out = select_held_out(held_out_sources, dataset, make_dataset, data_arguments, arguments, world)

    def export(metadata: dict) -> Path:
        return export_autoencoder(vae, dataset, Path(arguments.output_dir, VAE_DIR), metadata)

    return TrainingRun(
        arguments=arguments,
        world=world,
        state=state,
        dataset=dataset,
        mix=Mix(dataset.list_sizes, dataset.weights, arguments.seed),
        max_steps=max_steps,
        global_batch_size=global_batch_size,
        identity=identity,
        config=config,
        description=description,
        checkpoint=checkpoint,
        start_step=start_step,
        interval=IntervalMetrics(world, state=unlogged, max_skipped_share=data_arguments.max_skipped_share),
        draw_every=vae_arguments.image_logging_steps,
        draw=draw,
        export=export,
        validate=held_out and partial(validation_loss, state, held_out, world, autocast(arguments)),
    )


def reconstruction_pictures(state: TrainingState, vae, dataset: TextImageDataset, world: World) -> tuple[dict, dict]:
    """({"reconstruction": originals over reconstructions}, {"psnr": dB}) of a fixed set of rows.

    The ranks share the rows; all know the number, the main one has the picture. A collective call.
    """
    rows, found = spread(len(dataset), NUM_PICTURES), []
    mine = [rows[number] for number in shard(len(rows), world)]
    with undisturbed(state):
        if mine:
            pixels = make_batch(dataset, mine)["pixel_values"]
            found = list(zip(pixels.numpy(), reconstruct(vae, pixels).astype("float32").numpy(), strict=True))
    originals, decoded = (np.stack(side) for side in zip(*gather_in_order(gather_objects(found, world)), strict=True))
    numbers = {"psnr": psnr(paddle.to_tensor(originals), paddle.to_tensor(decoded))}
    if not world.is_main:
        return {}, numbers
    pictures = np.concatenate([originals.transpose(0, 2, 3, 1), to_pictures(paddle.to_tensor(decoded))])
    return {"reconstruction": tile(pictures, len(originals))}, numbers


def export_autoencoder(vae, dataset: TextImageDataset, folder: Path, metadata: dict) -> Path:
    """Measure the latents, put 1 / std into the config as scaling_factor, and write the VAE's folder."""
    vae.eval()
    rows = spread(len(dataset), NUM_MEASURED)
    with progress(range(0, len(rows), 16), desc="measuring latents", unit="batch") as starts:
        statistics = latent_statistics(vae, (_encoder_inputs(dataset, rows[i : i + 16]) for i in starts))
    scaling_factor = 1.0 / statistics["latent_std"]
    vae.register_to_config(scaling_factor=scaling_factor)
    get_logger().info("latents of %(pictures)d pictures: mean %(latent_mean).3f, std %(latent_std).3f", statistics)
    with atomic_dir(folder) as target:
        save_part(vae, target)
        describe_autoencoder(vae).write(target)
        write_json(target / "ppldm.json", {**metadata, **statistics, "scaling_factor": scaling_factor})
    return folder


def _encoder_inputs(dataset: TextImageDataset, rows: list[int]):
    batch = make_batch(dataset, rows)
    return batch["pixel_values"], batch["posterior_noise"]
