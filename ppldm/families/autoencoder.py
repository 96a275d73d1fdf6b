"""An autoencoder by itself: an AutoencoderKL, such as `ldm` takes for its VAE, or stage A of Stable Cascade
(docs/models.md has the loss)."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..config.load import MISSING
from ..config.option import Count, Needs, NotNegative, Positive, UpdatesOr0, option
from ..data.shapes import make_shapes
from ..networks.configs import check_fit, downscale_factor, is_pixels, read_new_config
from ..utils.errors import CheckpointError, ConfigError
from ..utils.log import get_logger, progress
from ..utils.processes.ranks import gather_in_order, gather_objects, shard
from ..weights.fetch import RANDOM
from ..weights.model_file import Component
from ..weights.source import config_here
from .base import Family, Sitting, check_sides, published_config
from .settings import AverageSettings, config_option, weights_option

NUM_PICTURES = 16  # reconstructed for pictures and PSNR, spread evenly over the rows
NUM_MEASURED = 1024  # encoded for the latents' statistics, at most
_MEASURED_AT_A_TIME = 16

_model = partial(option, section="model")
_loss = partial(option, section="model", identity=True)
_NEW_VAE = Needs("--vae_name_or_path, which brings its own config", lambda given: not given.vae_name_or_path, True)
_PERCEPTUAL = Needs("--perceptual_weight above 0", lambda given: given.perceptual_weight > 0)
_ADVERSARIAL = Needs("--adversarial_weight above 0", lambda given: given.adversarial_weight > 0)
_ALIGNED = Needs("--alignment_features", lambda given: given.alignment_features)


@dataclass(kw_only=True)
class ReconstructionSettings(AverageSettings):
    """How reconstructions are compared with pictures. A subclass has the options of its `network`, which is trained."""

    network: ClassVar[str]

    # Of the hand-written loop's flags, where the defaults of the published text-to-image script do not fit.
    loop_defaults: ClassVar[dict] = {
        "output_dir": "./output-autoencoder",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
    }

    reconstruction_loss: str = _loss("l1", choices=("l1", "mse", "l1_mse"))
    "Error between picture and reconstruction: absolute, squared, or their sum."
    perceptual_weight: NotNegative = _loss(0.0, "Weight of LPIPS against the mean error of the pixels; 1 as published.")
    lpips_weights: str | None = _model(None, kind="lpips", needs=_PERCEPTUAL)
    """Weights of LPIPS on VGG16: a file, a folder with VGG16's and those of the linear layers, or random, which
    compares with no published distance."""
    adversarial_weight: NotNegative = _loss(0.0)
    "Weight of the adversarial loss beside its adaptive one; 0.5 as published."
    adversarial_start: UpdatesOr0 = _loss(50001, needs=_ADVERSARIAL)
    "Updates before the discriminator begins to run and to learn."
    discriminator_weights: str | None = _model(None, kind="file", needs=_ADVERSARIAL)
    "Discriminator to start from: CompVis' .ckpt, a checkpoint's model_state.pdparams, or a file of it alone."
    discriminator_channels: Count = _model(64, "Channels of a new discriminator's first layer.", needs=_ADVERSARIAL)
    discriminator_layers: Count = _model(3, "How often a new discriminator halves the sides.", needs=_ADVERSARIAL)
    discriminator_learning_rate: Positive | None = _loss(None, needs=_ADVERSARIAL)
    "Learning rate of the discriminator (default: --learning_rate)."
    offline: bool = _model(False, "Never touch the network: names must be in the cache.")
    image_logging_steps: int = option(1000, section="validation", unit="updates")
    "Draw reconstructions and log PSNR every this many updates; 0 or less: never."

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        self.check_average()
        if self.perceptual_weight and self.lpips_weights is None:
            raise ConfigError("--perceptual_weight needs LPIPS; give --lpips_weights FILE, or random")
        if self.lpips_weights not in (None, RANDOM, MISSING) and not Path(self.lpips_weights).expanduser().exists():
            raise ConfigError(f"--lpips_weights {self.lpips_weights} is not there; give a file, a folder, or {RANDOM}")

    @property
    def source(self) -> str | None:
        """The folder or name of the weights to start from."""
        return getattr(self, f"{self.network}_name_or_path")

    def network_config(self) -> dict | None:
        """The completed config of the network; None of weights that are not here. Raises ConfigError, ModelError."""
        file = getattr(self, f"{self.network}_config_file")
        if self.source:
            config = config_here(self.network, self.source)
        else:
            config = read_new_config(self.network, file, f"--{self.network}_config_file")
        if config:
            check_fit({self.network: config}, self.source or file, ConfigError)
            if is_pixels(config):
                raise ConfigError(f"{self.source or file} is pixels in place of a VAE: nothing of it is trained; "
                                  "name another")  # fmt: skip
        return config


@dataclass(kw_only=True)
class AutoencoderConfig(ReconstructionSettings):
    """What an autoencoder is trained as."""

    family: ClassVar[str] = "autoencoder"
    network: ClassVar[str] = "vae"

    vae_config_file: str = _model("vae_tiny", kind="network", needs=_NEW_VAE)
    "Config of an AutoencoderKL, built from scratch: a JSON file, or a name. Not beside --vae_name_or_path."
    vae_name_or_path: str | None = _model(None, kind="model")
    "Autoencoder to start from: a folder, a .ckpt, or a name."
    train_decoder_only: bool = _loss(False)
    "Keep the encoder, the latents and their scaling factor as they are; needs --vae_name_or_path."
    kl_weight: NotNegative = _loss(1e-6)
    "Weight of the KL divergence, in nats a picture, against the summed error of its pixels."

    alignment_features: str | None = _model(None, kind="file")
    """DINOv2, a file or folder: latents learn to be like its features, with which they are easier to generate
    (VA-VAE)."""
    alignment_weight: Positive = _loss(0.1, needs=_ALIGNED)
    "Weight of this alignment beside its adaptive one."

    def check(self) -> None:
        """Also that there is an encoder to keep, and one that learns where latents are aligned."""
        super().check()
        if self.alignment_features and self.train_decoder_only:
            raise ConfigError("--alignment_features is for an encoder that learns; omit --train_decoder_only")
        if self.alignment_features and not Path(self.alignment_features).expanduser().exists():
            raise ConfigError(f"--alignment_features {self.alignment_features} is not there; give a file or a folder")
        if self.train_decoder_only and self.vae_name_or_path is None:
            raise ConfigError("--train_decoder_only needs a trained encoder; give --vae_name_or_path")


class Autoencoder(Family):
    """Trains all of it. export_folder is also the name of the component. whose: for messages."""

    whose: ClassVar[str] = "the VAE's"
    plural = "autoencoders"
    Config = AutoencoderConfig
    components: ClassVar = {
        **{"vae": "vae", "discriminator": "PatchDiscriminator", "lpips": "Lpips"},
        **{"dinov2": "Dinov2", "alignment": "LatentAlignment"},
    }
    optional = ("discriminator", "lpips", "dinov2", "alignment")
    unsupported = ("fp16", "recompute", "to_static")
    half_precision_levels = ("O1",)
    export_folder = "vae"

    def check(self, config: AutoencoderConfig, data) -> None:
        """The network's config, and the discriminator's, with the size of pictures."""
        if found := config.network_config():
            check_sides(downscale_factor(found), self.whose, data)
        least = 3 * 2**config.discriminator_layers
        side = min(min(one) for one in make_shapes(data) or [(data.resolution, data.resolution)])
        if config.adversarial_weight and side < least:
            raise ConfigError(
                f"--discriminator_layers {config.discriminator_layers} needs pictures of {least} pixels a side; some "
                f"have {side}; lower it"
            )

    def unsaved(self, config) -> tuple[str, ...]:
        return ("lpips", "dinov2")

    def exported(self, config) -> tuple[str, ...]:
        return (config.network,)

    def networks(self, config: AutoencoderConfig, data) -> dict[str, Component]:
        """With those of the loss; a discriminator from a file as large as the settings have it."""
        own = config.network_config() or published_config(config.network, config.network, config.source)
        found = {config.network: Component(own, trained=True)}
        if config.adversarial_weight:
            sizes = {"channels": config.discriminator_channels, "layers": config.discriminator_layers}
            found["discriminator"] = Component(sizes, trained=True)
        if config.perceptual_weight:
            found["lpips"] = Component({}, trained=False)
        if features := getattr(config, "alignment_features", None):
            from ..weights.losses import load_dinov2

            sizes = load_dinov2(features).config
            found["dinov2"] = Component(sizes, trained=False)
            joint = {"channels": own["latent_channels"], "features": sizes["width"]}
            found["alignment"] = Component(joint, trained=True)
        return found

    def build(self, config: AutoencoderConfig, data, seed: int):
        """Anew from its config, or from weights, with the networks of its loss."""
        import paddle

        from ..networks.build import build_network
        from ..weights.fill import fill_component
        from ..weights.losses import load_alignment, load_discriminator, load_lpips
        from ..weights.source import read_component

        with paddle.utils.unique_name.guard():
            if config.source:
                found = read_component(config.network, config.source, offline=config.offline)
                network = fill_component(config.network, found)
                check_sides(downscale_factor(network.config), self.whose, data)
            else:
                network = build_network(config.network, config.network_config(), seed)
        lpips = load_lpips(config.lpips_weights, seed) if config.perceptual_weight else None
        discriminator = None
        if config.adversarial_weight:
            sizes = (config.discriminator_channels, config.discriminator_layers)
            discriminator = load_discriminator(config.discriminator_weights, *sizes, seed)
        features = getattr(config, "alignment_features", None)
        aligned = load_alignment(features, network.config.latent_channels, seed) if features else ()
        return self.objective(network, config, lpips, discriminator, *aligned)

    def objective(self, vae, *parts):
        """The model to train, of its network, its settings and the networks of its loss."""
        from ..data.inputs import Normals, Pixels
        from ..networks.autoencoder import AutoencoderObjective
        from ..utils.rng import Stream

        model = AutoencoderObjective(vae, *parts)
        latents = Normals(Stream.POSTERIOR, vae.config.latent_channels, downscale_factor(vae.config))
        model.inputs = {"pixel_values": Pixels(), "posterior_noise": latents}
        return model

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Originals over reconstructions of a fixed set of rows, and their PSNR. The ranks share the rows."""
        import numpy as np
        import paddle

        from ..data.loader import first_epoch
        from ..diffusion.guided import to_pictures
        from ..networks.autoencoder import psnr
        from ..utils.pictures import titled_rows

        rows, found = sitting.dataset.spread(NUM_PICTURES), {}
        mine = [rows[number] for number in shard(len(rows), sitting.world)]
        for batch in sitting.dataset.split(mine, NUM_PICTURES):
            pixels = first_epoch(sitting.dataset, batch)["pixel_values"]
            with paddle.amp.auto_cast(enable=False):
                decoded = sitting.model.reconstruct(pixels).astype("float32").numpy()
            found |= zip(batch, zip(pixels.numpy(), decoded, strict=True), strict=True)
        pairs = gather_in_order(gather_objects([found[row] for row in mine], sitting.world))
        values = (np.concatenate([picture.ravel() for picture in side]) for side in zip(*pairs, strict=True))
        numbers = {"psnr": psnr(*map(paddle.to_tensor, values))}
        if not sitting.world.is_main:
            return {}, numbers
        rows = {"original": [original.transpose(1, 2, 0) for original, _ in pairs]}
        rows["reconstruction"] = [to_pictures(paddle.to_tensor(decoded[None]))[0] for _, decoded in pairs]
        return {"reconstruction": titled_rows(rows)}, numbers

    def export(self, model, config: AutoencoderConfig, dataset, folder: Path, average, metadata: dict) -> None:
        """The network's folder, with what brings its latents to unit variance; where the encoder was not trained, or
        the average is made afterwards, what did before. Raises CheckpointError where there was none yet."""
        from ..data.loader import first_epoch
        from ..networks.autoencoder import latent_statistics
        from ..networks.build import save_component
        from ..utils.files import atomic_dir, write_json
        from ..weights.fill import describe_model

        network, scale = getattr(model, config.network), model.scale
        others = {} if model.decoder_only else dict.fromkeys(model.replaced)
        network.eval()
        with atomic_dir(folder) as target, average.applied() if average else nullcontext():
            found = {}
            if dataset is None:
                factor = metadata.pop(scale, network.config[scale] if model.decoder_only else None)
                if factor is None:
                    raise CheckpointError("the scaling factor is measured when the run ends; train to its end first")
                network.register_to_config(**others, **{scale: factor})
            elif not model.decoder_only:
                batches = dataset.split(dataset.spread(NUM_MEASURED), _MEASURED_AT_A_TIME)
                with progress(batches, desc="measuring latents", unit="batch") as chunks:
                    inputs = (model.inputs_of(first_epoch(dataset, chunk)) for chunk in chunks)
                    found = latent_statistics(model.latents(**one) for one in inputs)
                get_logger().info(
                    "latents of %(pictures)d pictures: mean %(latent_mean).3f, std %(latent_std).3f", found
                )
                network.register_to_config(**others, **{scale: model.scale_of(found["latent_std"])})
            save_component(network, target)
            described = describe_model(self, model)
            replace(described, components={config.network: described.components[config.network]}).write(target)
            write_json(target / "ppldm.json", {**metadata, **found, scale: float(network.config[scale])})


@dataclass(kw_only=True)
class CascadeAutoencoderConfig(ReconstructionSettings):
    """What it is trained as."""

    family: ClassVar[str] = "cascade_autoencoder"
    network: ClassVar[str] = "vqgan"

    vqgan_name_or_path: str | None = weights_option("Stage A to start from")
    vqgan_config_file: str | None = config_option("vqgan", "a new stage A", "vqgan_f4, vqgan_tiny")

    def check(self) -> None:
        super().check()
        if not (self.source or self.vqgan_config_file):
            raise ConfigError("nothing gives stage A: name --vqgan_config_file, or weights, --vqgan_name_or_path")


class CascadeAutoencoder(Autoencoder):
    whose = "stage A's"
    plural = "autoencoders of Stable Cascade"
    Config = CascadeAutoencoderConfig
    components: ClassVar = {"vqgan": "vqgan", "discriminator": "PatchDiscriminator", "lpips": "Lpips"}
    export_folder = "vqgan"

    def objective(self, vqgan, *parts):
        from ..data.inputs import Pixels
        from ..networks.autoencoder import QuantisedObjective

        model = QuantisedObjective(vqgan, *parts)
        model.inputs = {"pixel_values": Pixels()}
        return model


FAMILIES = (Autoencoder(), CascadeAutoencoder())
