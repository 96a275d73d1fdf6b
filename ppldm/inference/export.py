"""A trained model as a pipeline folder that ppdiffusers' LDMTextToImagePipeline loads.

model_index.json
vqvae/  unet/          config.json, model_state.pdparams (a KL autoencoder; the name is the pipeline's)
bert/                  config.json, model_state.pdparams
scheduler/             scheduler_config.json (DDIM, with the prediction type)
tokenizer/             vocab.txt and its configs
ppldm.json             what trained it: steps, samples seen, EMA or not
"""

from contextlib import nullcontext

from ..models.build import save_part
from ..models.ema import ExponentialMovingAverage
from ..models.ldm import LatentDiffusionModel
from ..utils.files import atomic_dir, write_json
from .sample import sampling_scheduler


def export_pipeline(
    model: LatentDiffusionModel, tokenizer, folder, ema: ExponentialMovingAverage | None, facts: dict
) -> None:
    """Write the pipeline folder atomically, with the averaged weights where there are any. `facts` go to ppldm.json."""
    from ppdiffusers import __version__ as ppdiffusers_version

    index = {
        "_class_name": "LDMTextToImagePipeline",
        "_ppdiffusers_version": ppdiffusers_version,
        "bert": ["ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion", "LDMBertModel"],
        "scheduler": ["ppdiffusers", "DDIMScheduler"],
        "tokenizer": ["ppdiffusers.transformers", "BertTokenizer"],
        "unet": ["ppdiffusers", "UNet2DConditionModel"],
        "vqvae": ["ppdiffusers", "AutoencoderKL"],
    }
    with atomic_dir(folder) as target, ema.applied() if ema else nullcontext():
        save_part(model.vae, target / "vqvae")
        save_part(model.unet, target / "unet")
        save_part(model.text_encoder, target / "bert")
        sampling_scheduler(model.noise_schedule, model.prediction_type).save_pretrained(str(target / "scheduler"))
        tokenizer.save(target / "tokenizer")
        write_json(target / "model_index.json", index)
        write_json(target / "ppldm.json", {**facts, "ema": ema is not None})
