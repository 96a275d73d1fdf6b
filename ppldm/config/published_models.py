"""Published models. No paddle here."""

# Published model names, each a size that is built from configs and initialised here as PyTorch does: those folders hold
# nothing but such initial weights, so nothing needs to be downloaded for them.
KNOWN_MODELS = {
    "CompVis/ldm_laion400M_pretrain": ("ldmbert", "unet"),
    "CompVis/ldm_12_laion400M_pretrain": ("ldmbert_12", "unet_12"),
}
DEFAULT_MODEL = "CompVis/ldm_laion400M_pretrain"
DEFAULT_VAE = "CompVis/stable-diffusion-v1-4/vae"
DEFAULT_TOKENIZER = "bert-base-uncased"
