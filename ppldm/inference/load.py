"""A trained model by its place: a pipeline, a checkpoint, a single file, or a name; or two stages of Stable Cascade."""

from collections.abc import Sequence

from ..data.text.tokenizer import load_tokenizer
from ..diffusion.drawing import drawing_of
from ..families.common.ldm_build import build_model, require_whole
from ..networks.engine import EAGER, check_engine, drawing_layers, use_engine
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from ..utils.machine.devices import current_device
from ..weights.components import Weights
from ..weights.fetch import locate_model
from ..weights.folders import FOLDERS
from ..weights.lora.merge import add_loras
from ..weights.noise_schedule import FLOW_CLASS, SCHEDULER_CLASS
from ..weights.read import read_cascade, read_weights
from ..weights.write import metadata_of
from .cascade import load_stages
from .half import FLOAT32, check_dtype, use_dtype
from .pipeline import TextToImage, check_keywords

DDIM = "DDIMScheduler"  # the class of a stored scheduler that ddim is


@check_keywords()
def load(
    path,
    *,
    ema: bool = False,
    original_config_file=None,
    tokenizer=None,
    lora: Sequence[str] = (),
    offline: bool = False,
    decoder=None,
    controlnet=None,
    prediction_type: str | None = None,
    rescale_betas_zero_snr: bool = False,
    engine: str | None = None,
    dtype: str | None = None,
) -> TextToImage:
    """The model at `path`: a pipeline folder (ppldm, ppdiffusers, diffusers), a checkpoint, the folder of a training
    or one with a training below, a single file (CompVis'
    .ckpt, Stable Diffusion's .safetensors or .ckpt), or a name.

    `ema`: the averaged weights of a checkpoint or a .ckpt. `original_config_file`: the YAML file of a .ckpt,
    or config.json of the VAE of a checkpoint that holds no model.json.
    `tokenizer`: a folder with vocab.txt, where the model brings none. `lora`: LoRA files to merge into the weights,
    each with its weight, as "FILE:0.8"; what they change adds up. `offline`: never touch the network.
    `decoder`: stage B of Stable Cascade, a checkpoint or a pipeline, where the model is its stage C; `controlnet`: a
    control network of that, a checkpoint or its own folder. `prediction_type`: epsilon or v_prediction, of a Stable
    Diffusion 2.x in a single file that does not say. `rescale_betas_zero_snr`: it was trained to a last timestep of
    pure noise, and does not say so. `engine`: one of `engine.ENGINES`, which computes the networks;
    None: eager. `dtype`: one of `half.DTYPES`, for them; None: float32. Raises ModelError or ConfigError.
    """
    engine, dtype = engine or EAGER, dtype or FLOAT32
    check_engine(engine)
    check_dtype(dtype, current_device())
    source = locate_model(path, offline)
    if prior := read_cascade(source, original_config_file, ema):
        asked = {"--engine": engine != EAGER, "--dtype": dtype != FLOAT32, "--prediction-type": prediction_type}
        _refuse({**asked, "--rescale-betas-zero-snr": rescale_betas_zero_snr}, "not for Stable Cascade")
        return load_stages(prior, path, decoder, controlnet, ema=ema, tokenizer=tokenizer, lora=lora, offline=offline)
    _refuse({"--decoder": decoder, "--controlnet": controlnet}, f"for stage C of Stable Cascade, and {path} is none")
    told = (original_config_file, ema, prediction_type, rescale_betas_zero_snr)
    weights = add_loras(read_weights(source, tuple(FOLDERS), *told), lora)
    require_whole(weights, path)
    folder = tokenizer or weights.tokenizer
    if folder is None:
        raise ModelError(f"{path} brings no tokenizer; name a folder with vocab.txt (tokenizer=, --tokenizer)")
    _tell_sampler(weights, path)
    model = build_model(weights, path)
    metadata = _read_metadata(weights, path)
    model.usual = drawing_of(metadata, model.process, path)
    loaded = load_tokenizer(folder, metadata["model_max_length"])
    if lora:
        loaded.seen = None  # it was trained on further captions
    model.mask_behind = loaded.end_id if metadata["mask_pad_tokens"] else None
    model.empty_end = loaded.end_id if metadata["empty_caption"] == "zeros" else None
    autocast = use_dtype(model, dtype)
    use_engine(drawing_layers(model), engine)
    computed = {"engine": engine} if engine != EAGER else {"dtype": dtype} if dtype != FLOAT32 else {}
    pipeline = TextToImage(model, loaded, metadata["resolution"], lora, computed, autocast)
    example = weights.metadata.get("example_prompt")
    pipeline.example_prompt = example if isinstance(example, str) else ""
    return pipeline


def _tell_sampler(weights: Weights, path) -> None:
    own = weights.scheduler.get(SCHEDULER_CLASS, DDIM)
    if own not in (DDIM, FLOW_CLASS):
        get_logger().info(
            "%s brings a %s; pictures are drawn with ddim unless another sampler is chosen, and it is exported with "
            "ddim: in the noise schedule and with the timesteps that it stores",
            *(path, own),
        )


def _refuse(asked: dict, why: str) -> None:
    for flag, value in asked.items():
        if value:
            raise ConfigError(f"{flag} is {why}; omit it")


def _read_metadata(weights: Weights, path) -> dict:
    """Raises ModelError."""
    metadata = metadata_of(weights)
    for name in ("model_max_length", "resolution"):
        if not isinstance(metadata[name], int) or metadata[name] < 1:
            raise ModelError(f"{path}: {name} {metadata[name]!r} of ppldm.json must be 1 or more; copy it again")
    return metadata
