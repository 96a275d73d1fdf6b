"""An autoencoder by itself: an AutoencoderKL, such as `ldm` takes for its VAE."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..config.option import Bounds, option
from ..networks.configs import check_fit, downscale_factor, read_new_config
from ..utils.errors import ConfigError
from ..utils.log import get_logger, progress
from ..utils.processes.rank_watch import gather_objects
from ..utils.processes.world import gather_in_order, shard
from ..weights.model_file import Component
from .base import Family, Sitting, check_sizes

NUM_PICTURES = 16  # reconstructed for pictures and PSNR, spread evenly over the rows
NUM_MEASURED = 1024  # encoded for the latents' statistics, at most
_MEASURED_AT_A_TIME = 16

_loss = partial(option, section="model", identity=True)


@dataclass(kw_only=True)
class AutoencoderConfig:
    """What an autoencoder is trained as."""

    family: ClassVar[str] = "autoencoder"
    # Of the hand-written loop's flags, where the defaults of the published text-to-image script do not fit.
    loop_defaults: ClassVar[dict] = {
        "output_dir": "./output-autoencoder",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
    }

    vae_config_file: str = option(
        "vae_tiny",
        "Config of an AutoencoderKL, built from scratch: a JSON file, or a name.",
        section="model",
        kind="network",
    )
    reconstruction_loss: str = _loss(
        "l1",
        "Error between picture and reconstruction: absolute, squared, or their sum.",
        choices=("l1", "mse", "l1_mse"),
    )
    kl_weight: float = _loss(
        1e-6,
        "Weight of the KL divergence, in nats a picture, against the summed error of its pixels.",
        bounds=Bounds(least=0),
    )
    image_logging_steps: int = option(
        1000,
        "Draw reconstructions and log PSNR every this many updates; 0: never.",
        section="validation",
        bounds=Bounds(least=0),
        unit="updates",
    )

    def check(self) -> None:
        """Every combination works."""

    def network_config(self) -> dict:
        """The completed config of the network. Raises ConfigError."""
        config = read_new_config("vae", self.vae_config_file, "--vae_config_file")
        check_fit({"vae": config}, self.vae_config_file, ConfigError)
        return config


class Autoencoder(Family):
    """Trains all of it."""

    name = "autoencoder"
    plural = "autoencoders"
    Config = AutoencoderConfig
    components: ClassVar = {"vae": "vae"}
    unsupported = ("fp16", "recompute", "to_static")
    half_precision_levels = ("O1",)
    export_folder = "vae"

    def check(self, config: AutoencoderConfig, data) -> None:
        """The network's config, with the size of pictures."""
        check_sizes(config.network_config(), data)

    def networks(self, config: AutoencoderConfig, data) -> dict[str, Component]:
        """The one."""
        return {"vae": Component(config.network_config(), trained=True)}

    def build(self, config: AutoencoderConfig, data, seed: int):
        """Anew, from its config."""
        from ..data.inputs import Normals, Pixels
        from ..networks.autoencoder import AutoencoderObjective
        from ..networks.build import build_autoencoder
        from ..utils.rng import Stream

        vae = build_autoencoder(config.vae_config_file, seed)
        model = AutoencoderObjective(vae, config.reconstruction_loss, config.kl_weight)
        latents = Normals(Stream.POSTERIOR, vae.config.latent_channels, downscale_factor(vae.config))
        model.inputs = {"pixel_values": Pixels(), "posterior_noise": latents}
        return model

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Originals over reconstructions of a fixed set of rows, and their PSNR. The ranks share the rows."""
        import numpy as np
        import paddle

        from ..data.loader import first_epoch
        from ..diffusion.guided import to_pictures
        from ..networks.autoencoder import psnr, reconstruct
        from ..utils.grid import pad_alike, tile

        rows, found = sitting.dataset.spread(NUM_PICTURES), {}
        mine = [rows[number] for number in shard(len(rows), sitting.world)]
        for batch in sitting.dataset.split(mine, NUM_PICTURES):
            pixels = first_epoch(sitting.dataset, batch)["pixel_values"]
            with paddle.amp.auto_cast(enable=False):
                decoded = reconstruct(sitting.model.vae, pixels).astype("float32").numpy()
            found |= zip(batch, zip(pixels.numpy(), decoded, strict=True), strict=True)
        pairs = gather_in_order(gather_objects([found[row] for row in mine], sitting.world))
        values = (np.concatenate([picture.ravel() for picture in side]) for side in zip(*pairs, strict=True))
        numbers = {"psnr": psnr(*map(paddle.to_tensor, values))}
        if not sitting.world.is_main:
            return {}, numbers
        pictures = [original.transpose(1, 2, 0) for original, _ in pairs]
        pictures += [to_pictures(paddle.to_tensor(decoded[None]))[0] for _, decoded in pairs]
        return {"reconstruction": tile(pad_alike(pictures), len(pairs))}, numbers

    def export(self, model, config: AutoencoderConfig, dataset, folder: Path, average, metadata: dict) -> None:
        """The VAE's folder, with 1 / std of the latents as its scaling factor."""
        from ..networks.autoencoder import latent_statistics
        from ..networks.build import save_component
        from ..utils.files import atomic_dir, write_json
        from ..weights.fill import describe_model

        vae, batches = model.vae, dataset.split(dataset.spread(NUM_MEASURED), _MEASURED_AT_A_TIME)
        vae.eval()
        with progress(batches, desc="measuring latents", unit="batch") as chunks:
            statistics = latent_statistics(vae, (_encoder_inputs(dataset, chunk) for chunk in chunks))
        scaling_factor = 1.0 / statistics["latent_std"]
        vae.register_to_config(scaling_factor=scaling_factor)
        get_logger().info("latents of %(pictures)d pictures: mean %(latent_mean).3f, std %(latent_std).3f", statistics)
        with atomic_dir(folder) as target:
            save_component(vae, target)
            describe_model(self, model).write(target)
            write_json(target / "ppldm.json", {**metadata, **statistics, "scaling_factor": scaling_factor})


def _encoder_inputs(dataset, rows: list[int]):
    from ..data.loader import first_epoch

    batch = first_epoch(dataset, rows)
    return batch["pixel_values"], batch["posterior_noise"]


FAMILY = Autoencoder()
