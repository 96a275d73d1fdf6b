"""Settings that families share: what a diffusion model learns, averages of weights, adapters, and what a model of
VAE, text encoder and UNet or transformer is told, wherever its components come from."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..config.option import Bounds, Count, Needs, NotNegative, Pixels, Positive, Share, Updates, option
from ..config.training import LARGEST_STD
from ..diffusion.drawing import KEPT, MOST_GUIDANCE, SAMPLERS, USUAL
from ..diffusion.process import BETA_SCHEDULES, PREDICTION_TYPES
from ..methods import load, make, names
from ..networks.configs import SIZE_EMBEDDING, read_new_config
from ..utils.errors import ConfigError
from ..utils.rng import Stream

_model = partial(option, section="model")
_loss = partial(option, section="model", identity=True)
_optimizer = partial(option, section="optimizer")
_drawn = partial(option, section="validation")
_LOGIT_NORMAL = Needs("--timestep_sampling logit_normal", lambda given: given.timestep_sampling == "logit_normal")
_BIASED = Needs("--timestep_sampling biased", lambda given: given.timestep_sampling == "biased")
_MIN_SNR = Needs("--loss_weighting min_snr", lambda given: given.loss_weighting in (None, "min_snr"))
_ADAPTERS = Needs("--lora_rank or --train_tokens", lambda given: given.trains_adapters)
_SIZES = Needs("--size_conditioning", lambda given: given.size_conditioning)
_ONE_DECAY = Needs(
    "--use_ema without --ema_start_iters, --ema_iters and --ema_beta, which have a decay of their own",
    lambda given: given.use_ema and given.ema_start_iters is given.ema_iters is given.ema_beta is None,
)
_P2 = Needs("--loss_weighting p2", lambda given: given.loss_weighting == "p2")
_LOOKED_AT = Needs("--image_logging_steps above 0", lambda given: given.image_logging_steps > 0)
_AVERAGED = Needs("an average (--use_ema, --ema_posthoc)", lambda given: given.decay() or given.ema_posthoc)
_POSTHOC = Needs("--ema_posthoc", lambda given: given.ema_posthoc is not None)
_NEEDS_LORA = Needs("--lora_rank", lambda given: given.lora_rank is not None)
_OF_PARTS = Needs(
    "a model of parts: --model_name_or_path gives all of it", lambda given: given.model_name_or_path is None
)
_NEW = re.compile(r"(\[[^\s\[\]]+\]|<[^\s<>]+>)(?:=(.*))?", re.S)
_KEEPS = "by default, while training and afterwards; saved with it (default: the whole starting model's"


def learning_rate_of(what: str, needs: Needs | None = None):
    """The option `<component>_learning_rate`; None is that of all (`--learning_rate`)."""
    text = f"Learning rate of {what} (default: --learning_rate)."
    return _optimizer(None, text, identity=True, needs=needs)


def weights_option(what: str, in_parts: bool = False):
    """The option `<component>_name_or_path`. in_parts: `--model_name_or_path` gives the component too."""
    text = f"{what}: a pipeline's folder, its own folder, or a name."
    return _model(None, text, kind="model", needs=_OF_PARTS if in_parts else None)


def config_option(component: str, what: str, known: str, in_parts: bool = False):
    """The option `<component>_config_file`; known: names that it takes. in_parts: as of `weights_option`."""
    flags = [*(["model_name_or_path"] if in_parts else []), f"{component}_name_or_path"]
    words = " and ".join(f"--{flag}" for flag in flags) + (" go" if in_parts else " goes")
    words = f"a component that is built anew: {words} before it"
    needs = Needs(words, lambda given: all(getattr(given, flag) is None for flag in flags))
    return _model(None, f"Config of {what}: a JSON file, or a name ({known}).", kind="network", needs=needs)


def lora_components(*able: str):
    """The option, of a model with these components that can have some; by default the first has them."""
    return _loss([able[0]], f"The networks of these layers: {', '.join(able)}.", needs=_NEEDS_LORA)


def lora_modules(default: str, others: str):
    """The option; others: what else it may be, in words."""
    what = f"Linear and convolution layers with one of these in their names get one: {default}, {others}"
    return _loss([default], what, needs=_NEEDS_LORA)


@dataclass(kw_only=True)
class ObjectiveSettings:
    """A base of the settings of families that have a `diffusion.process.Process`."""

    prediction_type: str = _loss("epsilon", choices=PREDICTION_TYPES)
    """What the network predicts: the noise, the velocity, the picture, the direction of rectified flow, or the picture
    with the loss of that direction (docs/methods.md)."""
    beta_schedule: str | None = _loss(None, choices=BETA_SCHEDULES)
    """Noise schedule (default: the starting model's, else scaled_linear, or cosine for Stable Cascade);
    squaredcos_cap_v2 is diffusers'. Flow has none."""
    rescale_betas_zero_snr: bool = _loss(False)
    "A noise schedule that ends in pure noise; needs v_prediction or sample."
    timestep_shift: Positive | None = _loss(None)
    """Move all noise levels: SNR / shift^2; above 1 means more noise, as large pictures need (default: the starting
    model's, else 1)."""
    shift_base_resolution: Pixels | None = _loss(None)
    "The same by the resolution that the noise levels were made for: shift = --resolution / this."
    timestep_sampling: str = _loss("uniform", choices=("uniform", *names("levels", "logit_normal")))
    "How often each noise level is drawn: all alike, as the sigmoid of a normal number, or some more often."
    logit_mean: float = _loss(0.0, "Mean of that normal number; above 0 means more noise.", needs=_LOGIT_NORMAL)
    logit_std: Positive = _loss(1.0, "Its standard deviation.", needs=_LOGIT_NORMAL)
    timestep_bias_from: Share = _loss(0.75, "The levels that biased prefers begin here, of 0 to 1.", needs=_BIASED)
    timestep_bias_to: Share = _loss(1.0, "They end here; 1 is noise alone.", needs=_BIASED)
    timestep_bias_multiplier: Positive = _loss(2.0, "How many times as often they are drawn.", needs=_BIASED)
    stratified_timesteps: bool = _loss(False)
    "Spread the noise levels of each update evenly, whatever ranks and micro-batches it is cut into."
    noise_offset: NotNegative = _loss(0.0, "Strength of a noise that is constant over each latent channel; 0 is none.")
    input_perturbation: NotNegative = _loss(0.0)
    "Strength of a second noise in what the UNet sees but does not predict (0.1 recommended)."
    loss_weighting: str | None = _loss(None, choices=("none", *names("weights", "min_snr", "p2", "adaptive")))
    "How much each noise level counts; adaptive learns it (default: min_snr with --snr_gamma, else none)."
    snr_gamma: Positive | None = _loss(None, needs=_MIN_SNR)
    "Min-SNR loss weighting with this gamma (5.0 recommended, and the default with --loss_weighting min_snr)."
    p2_gamma: NotNegative = _loss(1.0, "Exponent of the P2 weights (k + SNR)^-gamma.", needs=_P2)
    p2_k: Positive = _loss(1.0, "The k of the P2 weights.", needs=_P2)

    def check_objective(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        if self.prediction_type.startswith("flow"):
            for name in ("beta_schedule", "rescale_betas_zero_snr"):
                if getattr(self, name):
                    raise ConfigError(
                        f"--{name} is not for --prediction_type {self.prediction_type}, which has no betas; omit it"
                    )
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ConfigError(
                "--rescale_betas_zero_snr with --prediction_type epsilon cannot learn: the last timestep is noise "
                "alone; add --prediction_type v_prediction"
            )
        if self.rescale_betas_zero_snr and self.beta_schedule == "cosine":
            raise ConfigError("--beta_schedule cosine always keeps some signal; use squaredcos_cap_v2 with "
                              "--rescale_betas_zero_snr")  # fmt: skip
        if self.timestep_bias_from >= self.timestep_bias_to:
            raise ConfigError(f"--timestep_bias_from {self.timestep_bias_from:g} must be below --timestep_bias_to "
                              f"{self.timestep_bias_to:g}")  # fmt: skip
        if self.timestep_shift and self.shift_base_resolution:
            raise ConfigError("--timestep_shift and --shift_base_resolution say the same; give one of them")

    def chosen_schedule(self, resolution: int | None) -> dict:
        """What of a process the settings choose for pictures of `resolution`, by the names of model.json; the rest
        comes from the starting model, or is as published."""
        names = ("prediction_type", "rescale_betas_zero_snr", "beta_schedule", "timestep_shift")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.shift_base_resolution:
            chosen["timestep_shift"] = resolution / self.shift_base_resolution
        return chosen

    def weighting(self):
        """The weights of the loss (`methods.weights`); None: all are 1."""
        kind = self.loss_weighting or ("min_snr" if self.snr_gamma else "none")
        return None if kind == "none" else make("weights", kind, self)

    def noise_inputs(self, normals: Callable) -> dict:
        """The inputs (`data.inputs`) that are noise, of `normals(stream)` for latents, and `methods.offsets`."""
        inputs = {"noise": normals(Stream.NOISE)}
        for name in names("offsets"):
            if strength := getattr(self, name):
                inputs = load("offsets", name).add(inputs, strength, normals)
        return inputs

    def level_input(self, num_levels: int):
        """The input of a model (`data.inputs`) that draws its noise level, of so many."""
        from ..data.inputs import Level

        law = None if self.timestep_sampling == "uniform" else make("levels", self.timestep_sampling, self)
        return Level(Stream.TIMESTEP, num_levels, law, self.stratified_timesteps)


@dataclass(kw_only=True)
class AverageSettings:
    """A base of the settings of families whose weights may be averaged."""

    use_ema: bool = _optimizer(False, part_of="ema")
    "Keep an exponential moving average of the weights; pictures are drawn with it."
    ema_decay: Share = _optimizer(0.9999, "Decay of the average; reached gradually.", needs=_ONE_DECAY, part_of="ema")
    ema_start_iters: int | None = _optimizer(None, unit="updates", part_of="ema")
    "With one of the ema_ flags below: copy the weights up to this update (default: 5000)."
    ema_iters: Updates | None = _optimizer(None, part_of="ema")
    "Average every this many updates, with --ema_beta for a decay (default: 100)."
    ema_beta: Share | None = _optimizer(None, part_of="ema")
    "Decay of the average that is taken every --ema_iters updates (default: 0.9)."
    offload_ema: bool = _optimizer(False, needs=_AVERAGED)
    "Keep and update the averages in host memory, which saves 4 bytes a trained parameter of a device's."
    draw_unaveraged: bool = _drawn(False, needs=_AVERAGED)
    "Draw all pictures by the weights themselves too, beside those by their average."
    foreach_ema: bool = _optimizer(False, "Accepted for diffusers' command lines and not used.")
    ema_posthoc: list[float] | None = _optimizer(None, bounds=Bounds(above=0, most=LARGEST_STD), identity=True)
    """Track two more averages, of these relative standard deviations (0.05 0.10 recommended), and keep snapshots of
    them, from which `ppldm ema` makes any other after the training (docs/methods.md)."""
    ema_posthoc_every: Updates | None = _optimizer(None, needs=_POSTHOC)
    "Keep snapshots every this many updates, and after the last one (default: a fiftieth of the run)."
    ema_posthoc_dtype: str = _optimizer("float16", choices=("float16", "float32"), needs=_POSTHOC)
    "Type of the snapshots' numbers."

    def check_average(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        if self.ema_posthoc is not None and (len(self.ema_posthoc) != 2 or len(set(self.ema_posthoc)) != 2):
            raise ConfigError("--ema_posthoc takes two different standard deviations; give --ema_posthoc 0.05 0.10")

    def decay(self):
        """The decay (`methods/averages`): at intervals if a setting of them is given, else `ema` or None."""
        given = {"start_iters": self.ema_start_iters, "iters": self.ema_iters, "beta": self.ema_beta}
        if given := {name: value for name, value in given.items() if value is not None}:
            from ..methods.averages.ema_interval import IntervalDecay

            return IntervalDecay(**given)
        if not self.use_ema:
            return None
        from ..methods.averages.ema import GradualDecay

        return GradualDecay(self.ema_decay)


@dataclass(kw_only=True)
class AdapterSettings:
    """A base of the settings of families whose networks `networks.adapters` can adapt."""

    lora_rank: Count | None = _loss(None, also=("rank",))
    "Train low-rank adapters (LoRA) of this rank in place of the weights (docs/finetune.md)."
    lora_alpha: Positive | None = _loss(None, needs=_NEEDS_LORA)
    "They are scaled by this over their rank (default: the rank, or as --lora_from says)."
    lora_from: str | None = _model(None, kind="path", needs=_NEEDS_LORA)
    "LoRA, a file or folder, whose values they start from, in any form that --lora reads (default: new ones)."
    lora_modules: list[str] = lora_modules("attn", "ff, conv, to_q …")
    lora_components: list[str] = lora_components("unet", "text_encoder")
    train_tokens: list[str] = _loss([])
    """Train the embeddings of these tokens: a new one in <> or [], such as <fido>=^dog, which starts as the mean of the
    tokens that the regular expression matches; or an expression for known ones, such as ^dog."""
    export_merged: bool = option(False, section="run", needs=_ADAPTERS)
    "Beside the adapters, export the whole model with them merged in."

    @property
    def trains_adapters(self) -> bool:
        """True where nothing else is trained."""
        return self.lora_rank is not None or bool(self.train_tokens)

    def wanted_tokens(self) -> list[tuple[str, str | None]]:
        """(token, expression of what it starts from) of new tokens, (expression, None) of known ones."""
        matches = [_NEW.fullmatch(word) for word in self.train_tokens]
        return [(m[1], m[2] or "") if m else (word, None) for m, word in zip(matches, self.train_tokens, strict=True)]

    def check_adapters(self) -> None:
        """Raises ConfigError for what cannot work."""
        for token, pattern in self.wanted_tokens():
            try:
                re.compile(pattern or token)
            except re.error as error:
                raise ConfigError(
                    f"--train_tokens {pattern or token} is not a regular expression ({error}); correct it"
                ) from error
        tokens = [token for token, _ in self.wanted_tokens()]
        if double := next((token for token in tokens if tokens.count(token) > 1), None):
            raise ConfigError(f"--train_tokens names {double} twice; omit one")


@dataclass(kw_only=True)
class DrawnSettings:
    """A base of the settings of families that draw captions."""

    offline: bool = _model(False, "Never touch the network: names must be in the cache.")
    model_max_length: Count = _loss(77, "Tokens of a caption; longer ones are cut, shorter ones padded.", unit="tokens")
    image_logging_steps: int = _drawn(1000, unit="updates")
    "Draw sample pictures every this many updates; 0 or less: never."
    draw_predictions: bool = _drawn(False, needs=_LOOKED_AT)
    """Below the reconstruction, show the batch's pictures as the network is shown them, at their noise levels, and what
    it makes of each in one step."""
    guidance_scale: float | None = _drawn(
        None,
        f"Guidance scale that the model is drawn with {_KEEPS}, else {USUAL.guidance_scale}).",
        bounds=Bounds(least=0, most=MOST_GUIDANCE),
    )
    num_inference_steps: Count | None = _drawn(
        None, f"Sampling steps that the model is drawn in {_KEEPS}, else {USUAL.num_inference_steps}).", unit="steps"
    )
    sampler: str | None = _drawn(
        None, f"Sampler that the model is drawn by {_KEEPS}, else ddim, or flow-euler of flow).", choices=SAMPLERS
    )

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the networks that these settings give."""
        raise NotImplementedError

    def name_of(self, component: str) -> str | None:
        """The folder or name of a component's weights; None where it is built anew."""
        return getattr(self, f"{component}_name_or_path")

    def file_of(self, component: str) -> str | None:
        """The config of one that is built anew; None where there is none."""
        return getattr(self, f"{component}_config_file", None)

    def component_names(self) -> dict[str, str | None]:
        """`name_of` each component."""
        return {name: self.name_of(name) for name in self.components}

    def check_given(self, components: Iterable[str], further: str = "") -> None:
        """Raises ConfigError for the first that nothing gives. further: what else could."""
        for name in components:
            if not (self.name_of(name) or self.file_of(name)):
                anew = f", or the config of a new one, --{name}_config_file" if name != "vae" else ""
                raise ConfigError(f"nothing gives the {name}: name its weights, --{name}_name_or_path{anew}{further}")

    def kept(self) -> dict:
        """What is said of these, by the names of `Drawing`."""
        return {name: getattr(self, name) for name in KEPT if getattr(self, name) is not None}


@dataclass(kw_only=True)
class ControlSettings:
    """A base of the settings of families that train a control network: by what pictures are led."""

    control: str = _loss("canny")
    """Control images: canny, edges, grey, blur, tiles, super-resolution or inpainting, made of the pictures; row, the
    rows' second images; or a class of one's own, package.module:Class. Parameters follow with commas:
    canny,low=50,high=150 (docs/controlnet.md)."""


@dataclass(kw_only=True)
class TextToImageSettings(ObjectiveSettings, AverageSettings, AdapterSettings, DrawnSettings):
    """A base of the settings of text-to-image families. A subclass names the components, and says by the methods below
    what is given. denoiser: the component that removes the noise. new_text_encoder: the kind of a new one.
    default_tokenizer: of one that has none; None where it must be named. how_to_freeze: the text encoder."""

    denoiser: ClassVar[str] = "unet"
    new_text_encoder: ClassVar[str]
    size_conditioning: ClassVar[bool] = False
    default_tokenizer: ClassVar[str | None] = None
    how_to_freeze: ClassVar[str]

    original_config_file: str | None = _model(None, kind="path")
    """YAML file of a .ckpt (default: the one of its name beside it); of PaddleMIX's model_state.pdparams the folder of
    unet.json, ldmbert.json and vae.json (default: its own); of a checkpoint without model.json
    the VAE's config.json."""
    latents_statistics: str | None = _model(None, kind="path")
    """JSON file with the mean and deviation of the VAE's latents by channel, as `ppldm precompute --json` prints; they
    replace the shift and scaling of its config and are saved with the model."""
    load_ema: bool = _model(False, "Start from the averaged weights of a checkpoint or a .ckpt.")
    mask_pad_tokens: bool = _loss(False)
    """Attention ignores the padding behind captions, in the text encoder and in what removes the noise; saved with the
    model."""
    empty_caption: str = _loss("embedding", choices=("embedding", "zeros"))
    "What is seen of an empty caption, in guidance too: the embedding of it, or zeros; saved with the model."
    enable_xformers_memory_efficient_attention: bool = _model(False)
    "Memory-efficient attention in what removes the noise (GPU only)."
    methods: list[str] = _loss([])
    """Train by these methods too (docs/methods.md has them), with options as contrastive_flow:weight=0.1."""

    def chosen_methods(self) -> tuple:
        """The methods by which is trained (`ppldm.methods`). Raises ConfigError."""
        if not self.methods:
            return ()
        from ..methods.base import read_methods

        if self.trains_adapters:
            raise ConfigError(f"--methods {' '.join(self.methods)} cannot train adapters; omit either")
        return read_methods(self.methods, self)

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work, wherever the components come from."""
        self.chosen_methods()
        if self.latents_statistics and self.starts_from_pipeline:
            raise ConfigError(
                "--latents_statistics would give the whole model of --model_name_or_path latents that it has not "
                "learned; omit it"
            )
        self.check_objective()
        self.check_average()
        self.check_adapters()

    @property
    def train_text_encoder(self) -> bool:
        """Whether it is trained where there are no adapters."""
        raise NotImplementedError

    @property
    def trains_text_encoder(self) -> bool:
        """False where it is frozen."""
        if self.trains_adapters:
            return bool(self.train_tokens) or "text_encoder" in self.lora_components
        return self.train_text_encoder

    @property
    def starts_from_pipeline(self) -> bool:
        """True where all components come from the whole model that `model_name_or_path` names."""
        raise NotImplementedError

    @property
    def components(self) -> tuple[str, ...]:
        return "vae", "text_encoder", self.denoiser

    @property
    def trained(self) -> tuple[str, ...]:
        """The components whose own weights are trained."""
        return () if self.trains_adapters else (self.denoiser, *["text_encoder"] * self.trains_text_encoder)

    def new_config(self, name: str) -> dict:
        """The completed config of a component that is built anew. Raises ConfigError."""
        kind = self.new_text_encoder if name == "text_encoder" else name
        config = read_new_config(kind, self.file_of(name), f"--{name}_config_file")
        if self.size_conditioning and name == "unet" and config["addition_embed_type"] is None:
            config |= SIZE_EMBEDDING
        return config


@dataclass(kw_only=True)
class UNetSettings(TextToImageSettings):
    """The same where a UNet removes the noise."""

    size_conditioning: bool = _loss(False)
    """Tell the UNet each picture's own size, where its crop lies and the size trained at, as SDXL's is told; a new UNet
    gets layers for it, which are saved with the model (docs/data.md)."""
    size_conditioning_drop: Share = _loss(0.0, needs=_SIZES)
    "Of this share of the samples it is told six zeros: sizes unknown."
    unet_learning_rate: Positive | None = learning_rate_of("the UNet")


@dataclass(kw_only=True)
class PartsSettings(TextToImageSettings):
    """A base without published defaults. A subclass has `<denoiser>_name_or_path` and `<denoiser>_config_file`."""

    how_to_freeze = "omit --train_text_encoder"

    model_name_or_path: str | None = _model(None, also=("pretrained_model_name_or_path",), kind="model")
    """Pipeline to fine-tune, whole: its folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, or a name, such as
    stabilityai/stable-diffusion-2-1. Goes before all flags of single components."""
    vae_name_or_path: str | None = weights_option("Frozen VAE, or pixels to do without one", in_parts=True)
    text_encoder_name_or_path: str | None = weights_option(
        "Text encoder to start from, with its tokenizer", in_parts=True
    )
    text_encoder_config_file: str | None = config_option(
        "text_encoder", "a text encoder that is built anew", "clip_vit_l, clip_vit_h, ldmbert_12", in_parts=True
    )
    tokenizer_name: str | None = _model(None, kind="tokenizer")
    "Folder with vocab.json and merges.txt, or with vocab.txt (default: the text encoder's own)."
    train_text_encoder: bool = _model(False, "Train the text encoder too.", identity=True)
    text_encoder_learning_rate: Positive | None = learning_rate_of(
        "the text encoder", Needs("--train_text_encoder, or an adapter in it", lambda given: given.trains_text_encoder)
    )

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        if not self.starts_from_pipeline:
            self.check_given(self.components, "; or a whole pipeline, --model_name_or_path")
            self.check_text_encoders()
        super().check()

    def check_text_encoders(self) -> None:
        """Of a model of parts. Raises ConfigError."""
        if not (self.text_encoder_name_or_path or self.train_text_encoder):
            raise ConfigError(
                f"--text_encoder_config_file {self.text_encoder_config_file} makes a text encoder that knows "
                "nothing yet; add --train_text_encoder, or start from a trained one: --text_encoder_name_or_path"
            )

    @property
    def starts_from_pipeline(self) -> bool:
        return self.model_name_or_path is not None
