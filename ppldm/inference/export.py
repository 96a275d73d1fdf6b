"""Trained models as folders that other programs load (the layouts are in ppldm/weights/write.py)."""

from pathlib import Path
from typing import Annotated

from ..utils.errors import ConfigError
from ..utils.files import local_path
from ..weights.lora.flag import Loras, check_loras


def export(
    model: str,  # checkpoint, run or pipeline folder (ppldm, ppdiffusers, diffusers), CompVis' .ckpt, or a name
    out: Annotated[str, {"opt": True, "required": True}],  # folder to write; one that is there is replaced
    to: Annotated[str, {"opt": True, "choices": ["ppdiffusers", "diffusers", "compvis"]}] = "ppdiffusers",  # whose form
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    dtype: Annotated[str, {"opt": True, "choices": ["float32", "float16"]}] = "float32",  # of the weights written
    safetensors: bool = False,  # for ppdiffusers: .safetensors in place of .pdparams (diffusers always gets them)
    original_config_file: str = None,  # YAML of a .ckpt, folder of JSON of a .pdparams; of old checkpoints VAE's
    tokenizer: str = None,  # tokenizer folder to put in; by default the model's own
    prediction_type: str = None,  # epsilon or v_prediction, of a Stable Diffusion 2 in one file that does not say
    rescale_betas_zero_snr: bool = False,  # it was trained to a last timestep of pure noise, and does not say so
    lora: Loras = None,  # LoRA files to merge into the weights, each with its weight: FILE:0.8
    offline: bool = False,  # never touch the network
):
    """Write a trained model for ppdiffusers, diffusers or CompVis' code."""
    from ..utils.machine.cpu import load_paddle
    from ..weights.fetch import check_name

    if safetensors and to == "compvis":
        raise ConfigError("--safetensors is not for --to compvis, whose code reads model.ckpt; omit one of them")
    target, lora = local_path(out), check_loras(lora)
    check_name(model)
    load_paddle()
    from ..utils.log import get_logger, quiet_libraries
    from ..weights.lora.merge import add_loras
    from ..weights.source import open_model
    from ..weights.write import why_drawn_by_ppldm, write_cascade, write_weights

    quiet_libraries()
    told = {"config_file": original_config_file, "ema": ema, "prediction_type": prediction_type}
    source = open_model(model, offline, zero_snr=rescale_betas_zero_snr, **told)
    refuse_to_overwrite(source.path, target)
    if tokenizer and not Path(tokenizer).is_dir():
        raise ConfigError(f"no tokenizer folder {tokenizer}; --tokenizer names one with vocab.txt")
    if cascade := source.stages():
        if to != "diffusers" or lora or prediction_type or rescale_betas_zero_snr:
            raise ConfigError("a model of Stable Cascade is exported with --to diffusers and without --lora, "
                              "--prediction-type and --rescale-betas-zero-snr")  # fmt: skip
        own = Path(tokenizer) if tokenizer else cascade.tokenizer
        write_cascade(cascade.components, target, own, dtype, cascade.metadata)
        get_logger().info("%s for %s in %s", source.path, to, target)
        return
    weights = add_loras(source.read(), lora)
    weights.tokenizer = Path(tokenizer) if tokenizer else weights.tokenizer
    if weights.tokenizer is None:
        get_logger().warning("%s has no tokenizer; name its folder with --tokenizer to make the export whole", model)
    if reason := why_drawn_by_ppldm(weights, to):
        get_logger().warning("%s: ppldm draws with the export, %s does not", reason, to)
    write_weights(weights, to, target, dtype, safetensors)
    get_logger().info("%s for %s in %s", source.path, to, target)


def refuse_to_overwrite(source: Path, target: Path) -> None:
    """Raises ConfigError where `target` is a file, holds something else than an exported model, or holds the source."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--out {target} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "ppldm.json").is_file():
        raise ConfigError(f"--out {target} holds files that are not an exported model; choose another folder")
    if target.resolve() == source.resolve() or target.resolve() in source.resolve().parents:
        raise ConfigError(f"--out {target} holds the model to export; choose another folder")
