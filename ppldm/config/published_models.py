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

# The networks of published models whose shapes are known without a download, as configs of the package by component.
_SD1 = {"vae": "vae_kl_f8", "text_encoder": "clip_vit_l", "unet": "unet_sd1"}
_SD2 = {"vae": "vae_kl_f8", "text_encoder": "clip_vit_h", "unet": "unet_sd2"}
_NETWORKS = {
    **dict.fromkeys(("CompVis/stable-diffusion-v1-4", "stable-diffusion-v1-5/stable-diffusion-v1-5"), _SD1),
    **{f"stabilityai/stable-diffusion-{name}": _SD2 for name in ("2", "2-base", "2-1", "2-1-base")},
    "openai/clip-vit-large-patch14": {"text_encoder": "clip_vit_l"},
}


def published_network(component: str, name: str) -> str | None:
    """The package's config of a component of the model `owner/model[/component]`; None where it is not known."""
    return _NETWORKS.get("/".join(name.split("/")[:2]), {}).get(component)
