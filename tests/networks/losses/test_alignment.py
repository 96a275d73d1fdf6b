"""Latents that are aligned to features: the published terms, balanced once an update, and of the training only."""

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, write_dinov2

from ppldm.families.autoencoder import Autoencoder, AutoencoderConfig
from ppldm.networks.losses import LatentAlignment
from ppldm.utils.errors import ConfigError


def unit(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(3))
def test_terms_are_as_published(seed):
    """Place by place behind a learned map, and between all pairs of places of a picture, each beyond its margin."""
    rng = np.random.default_rng(seed)
    layer = LatentAlignment(4, 8)
    latents, features = (rng.standard_normal(shape, np.float32) for shape in ((2, 4, 6, 4), (2, 8, 3, 2)))
    pooled = latents.reshape(2, 4, 3, 2, 2, 2).mean((3, 5)).reshape(2, 4, 6)
    flat, places = features.reshape(2, 8, 6), layer.projection.weight.numpy()[:, :, 0, 0]
    cosines = (unit(np.einsum("fc,bcn->bfn", places, pooled)) * unit(flat)).sum(1)
    pairs = [np.einsum("bcn,bcm->bnm", unit(one), unit(one)) for one in (pooled, flat)]
    expected = np.maximum(0, 0.5 - cosines).mean() + np.maximum(0, np.abs(pairs[0] - pairs[1]) - 0.25).mean()
    assert float(layer(paddle.to_tensor(latents), paddle.to_tensor(features))) == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < 2.75


def model_of(tiny, **settings):
    config = AutoencoderConfig(
        vae_config_file=tiny.config("vae"), alignment_features=str(write_dinov2(tiny.folder)), **settings
    )
    config.check()
    return Autoencoder().build(config, None, 3)


@pytest.mark.parametrize("cut", [[4], [1, 3], [1, 1, 1, 1]])
def test_it_is_balanced_by_the_gradients_of_latents_however_an_update_is_cut(tiny, cut):
    """From the second update on it adds `alignment_weight` of the gradient that the pixels' error has there."""
    model = model_of(tiny, alignment_weight=0.3, kl_weight=0)
    batch = {name: one for name, one in make_batch(4).items() if name in model.inputs}
    model.train()

    def gradient_at_latents(aligned: bool):
        """Of all four pictures at once."""
        seen, encode = [], model.vae.encode

        def watched(pixels):
            found = encode(pixels)
            mean = found.latent_dist.mean
            mean.register_hook(lambda gradient: seen.append(gradient.numpy()))
            return found

        model.vae.encode, model.dinov2, held = watched, model.dinov2 if aligned else None, model.dinov2
        model(**batch).value.backward()
        model.vae.encode, model.dinov2 = encode, held
        return seen[0]

    for part in np.split(np.arange(4), np.cumsum(cut)[:-1]):
        loss = model(**{name: one[part.tolist()] for name, one in batch.items()})
        (loss.value * (len(part) / 4)).backward()
    model.keep_statistics(model.statistics([loss]))
    plain = gradient_at_latents(False)
    added = gradient_at_latents(True) - plain
    assert np.linalg.norm(added) == pytest.approx(0.3 * np.linalg.norm(plain), rel=1e-3)


def test_what_of_it_is_trained_and_kept(tiny):
    model = model_of(tiny)
    assert model.components["alignment"].trained and not model.components["dinov2"].trained
    assert "dinov2" in model.unsaved and "alignment.ratio" in model.state_dict()


def test_it_is_refused_where_nothing_is_aligned(tiny):
    with pytest.raises(ConfigError, match="omit --train_decoder_only"):
        model_of(tiny, train_decoder_only=True, vae_name_or_path=tiny.vae)
    with pytest.raises(ConfigError, match="--alignment_features gone is not there; give a file or a folder"):
        AutoencoderConfig(alignment_features="gone").check()
