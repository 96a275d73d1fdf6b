"""The discriminator and the balance: what they depend on, and that CompVis' formulas give the same gradients."""

import math
from types import SimpleNamespace

import needs
import numpy as np
import paddle
import pytest
from paddle import nn
from small_lpips import write_lpips

from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.networks.autoencoder import AutoencoderObjective
from ppldm.networks.build import init_network
from ppldm.networks.losses import GradientBalance, PatchDiscriminator, hinge_loss
from ppldm.utils.errors import ModelError
from ppldm.weights.formats.files import write_safetensors
from ppldm.weights.losses import load_discriminator, load_lpips

SIDE = 24


class Vae(nn.Layer):
    """Two convolutions, of which the second is the decoder's last."""

    def __init__(self):
        super().__init__()
        self.encoder, self.quant_conv, self.decoder = nn.Conv2D(3, 8, 1), nn.Identity(), nn.Layer()
        self.decoder.conv_out = nn.Conv2D(4, 3, 3, padding=1)

    def encode(self, pixels):
        mean, logvar = self.encoder(pixels).split(2, axis=1)
        latent = SimpleNamespace(mean=mean, logvar=logvar, std=(0.5 * logvar).exp(), var=logvar.exp())
        return SimpleNamespace(latent_dist=latent)

    def decode(self, latents):
        return SimpleNamespace(sample=self.decoder.conv_out(latents))


def make_model(folder, ratio=0.03, **settings):
    paddle.seed(3)
    discriminator = init_network(PatchDiscriminator(8, 2), "discriminator", 1)
    for parameter in discriminator.parameters():
        parameter.set_value(parameter * 5)  # logits beyond the hinge's corner
    own = {"kl_weight": 0.01, "perceptual_weight": 0.7, "adversarial_weight": 0.5, "adversarial_start": 0}
    config = AutoencoderConfig(**own | settings)
    model = AutoencoderObjective(Vae(), config, load_lpips(write_lpips(folder)), discriminator)
    model.balance.ratio.set_value(paddle.to_tensor([ratio]))
    model.train()
    return model


def batch(count=4):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)
    return paddle.to_tensor(pixels), paddle.to_tensor(rng.standard_normal((count, 4, SIDE, SIDE), dtype=np.float32))


def gradients(model) -> dict:
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ratio", [0.001, 0.03, 50.0])
def test_gradients_are_those_of_compvis_formulas(tmp_path, ratio):
    needs.need("parity")
    import torch
    from torch.nn import functional as F

    model, (pixels, noise) = make_model(tmp_path, ratio), batch()
    model(pixels, noise).value.backward()
    own = {name: torch.tensor(p.numpy(), requires_grad=True) for name, p in model.state_dict().items()}

    def perceive(pictures):
        shift, scale = (torch.tensor(v).view(1, 3, 1, 1) for v in ((-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)))
        hidden, found = (pictures - shift) / scale, []
        for block in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)):
            hidden = F.max_pool2d(hidden, 2) if found else hidden
            for number in block:
                name = f"lpips.features.{number}"
                hidden = F.relu(F.conv2d(hidden, own[f"{name}.weight"], own[f"{name}.bias"], padding=1))
            found.append(hidden / (hidden.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found

    def judge(pictures, weights):
        main = {name.removeprefix("discriminator.main."): value for name, value in weights.items() if "main" in name}
        hidden = F.leaky_relu(F.conv2d(pictures, main["0.weight"], main["0.bias"], 2, 1), 0.2)
        for place, stride in ((2, 2), (5, 1)):
            hidden = F.conv2d(hidden, main[f"{place}.weight"], None, stride, 1)
            scale = main[f"{place + 1}.weight"], main[f"{place + 1}.bias"]
            hidden = F.leaky_relu(F.group_norm(hidden, min(32, hidden.shape[1]), *scale), 0.2)
        return F.conv2d(hidden, main["8.weight"], main["8.bias"], 1, 1)

    inputs = torch.tensor(pixels.numpy()).float() / 127.5 - 1
    mean, logvar = F.conv2d(inputs, own["vae.encoder.weight"], own["vae.encoder.bias"]).chunk(2, 1)
    last = own["vae.decoder.conv_out.weight"]
    latents = mean + (logvar / 2).exp() * torch.tensor(noise.numpy())
    made = F.conv2d(latents, last, own["vae.decoder.conv_out.bias"], 1, 1)
    distance = sum(
        F.conv2d((one - other) ** 2, own[f"lpips.lins.{block}.weight"]).mean((2, 3), keepdim=True)
        for block, (one, other) in enumerate(zip(perceive(inputs), perceive(made), strict=True))
    )
    values = 3 * SIDE**2
    nll = (torch.abs(inputs - made) + 0.7 * distance).sum() / len(inputs)
    kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / len(inputs)
    # Their weight is of the sums over a picture's values, where ours is of the means.
    weight = min(ratio * values, 1e4)
    first = nll + 0.01 * kl + 0.5 * weight * -judge(made, own).mean()
    real, fake = judge(inputs, own), judge(made.detach(), own)
    second = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
    assert ((1 - real) < 0).any() or ((1 + fake) < 0).any()
    found = gradients(model)
    vae, learner = ([n for n in found if n.startswith(part)] for part in ("vae.", "discriminator."))
    expected = [g / values for g in torch.autograd.grad(first, [own[n] for n in vae], retain_graph=True)]
    expected += torch.autograd.grad(second, [own[n] for n in learner])
    assert len(vae) == 4 and len(learner) == 10
    for name, value in zip(vae + learner, expected, strict=True):
        scale = abs(value.numpy()).max()
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_the_balance_does_not_depend_on_how_an_update_is_cut(tmp_path):
    model, (pixels, noise) = make_model(tmp_path), batch()
    found = []
    for size in (4, 2, 1):
        losses = [model(pixels[i : i + size], noise[i : i + size]) for i in range(0, 4, size)]
        model.keep_statistics(model.statistics(losses))
        found.append(float(model.balance.ratio))
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
    assert found[0] > 0
    model.balance.ratio.zero_()
    halves = [model(pixels[i : i + 2], noise[i : i + 2]) for i in (0, 2)]
    model.keep_statistics(sum(model.statistics([half]) for half in halves))  # of two ranks
    assert float(model.balance.ratio) == pytest.approx(found[0], rel=1e-5)


def test_the_balance_is_the_ratio_of_the_two_norms_within_its_bound():
    balance = GradientBalance()
    assert float(balance.weight(100)) == 0
    balance.update(paddle.to_tensor([6.0, 8.0, 0.0, 2.0, 2.0]))  # two micro-batches: (3, 4) and (0, 1)
    assert float(balance.weight(100)) == pytest.approx(5 / (1 + 1e-4))
    assert float(balance.weight(10_000)) == 1.0


def test_it_neither_runs_nor_learns_before_its_update_nor_in_evaluation(tmp_path):
    model, (pixels, noise) = make_model(tmp_path, adversarial_start=3), batch()
    plain = make_model(tmp_path)
    plain.discriminator = None
    for model.num_updates, runs in ((0, False), (2, False), (3, True), (9, True)):
        loss = model(pixels, noise)
        loss.value.backward()
        assert (model.statistics([loss]) is not None) == runs
        assert any(name.startswith("discriminator") for name in gradients(model)) == runs
        assert (float(loss.value) == float(plain(pixels, noise).value)) != runs
        model.clear_gradients()
    model.eval()
    loss = model(pixels, noise)
    assert loss.statistics is None and float(loss.value) == float(plain(pixels, noise).value)
    assert 0 < float(loss.measures["lpips"]) < float(loss.value)
    assert model.networks["discriminator"].starts == 3 and "lpips" in model.unsaved


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_logit_does_not_depend_on_the_batch_nor_change_statistics(norm):
    layer, pictures = PatchDiscriminator(8, 2, norm), paddle.randn([4, 3, SIDE, SIDE])
    layer.train()
    before = {name: value.numpy().copy() for name, value in layer.state_dict().items()}
    alone = paddle.concat([layer(pictures[i : i + 1]) for i in range(4)])
    np.testing.assert_allclose(layer(pictures), alone, atol=1e-5)
    assert all((value.numpy() == before[name]).all() for name, value in layer.state_dict().items())


def test_judging_leaves_its_weights_without_gradients():
    layer, pictures = PatchDiscriminator(4, 1, "batch"), paddle.randn([2, 3, 16, 16])
    pictures.stop_gradient = False
    trained = [p for p in layer.parameters() if not p.stop_gradient]
    layer.judge(pictures).mean().backward()
    assert all(p.grad is None for p in trained) and float(pictures.grad.abs().sum()) > 0
    layer(pictures).mean().backward()
    assert all(p.grad is not None for p in trained) and len(trained) < len(layer.parameters())


def test_hinge_loss():
    real, made = paddle.to_tensor([2.0, 0.0]), paddle.to_tensor([-2.0, 1.0])
    assert float(hinge_loss(real, made)) == 0.5 * (0.5 + 1.0)


@pytest.mark.parametrize("prefix", ["", "discriminator.", "loss.discriminator."])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_published_discriminators_are_read(tmp_path, prefix, norm):
    layer = init_network(PatchDiscriminator(8, 2, norm), "discriminator", 5)
    theirs = {"_mean": "running_mean", "_variance": "running_var"}
    arrays = {}
    for name, value in layer.state_dict().items():
        start, last = name.rsplit(".", 1)
        arrays[f"{prefix}{start}.{theirs.get(last, last)}"] = value.numpy() + (last == "_mean")
    arrays |= {f"{prefix}main.3.num_batches_tracked": np.zeros((), np.int64), "encoder.main.0.weight": np.zeros(2)}
    write_safetensors(tmp_path / "d.safetensors", arrays, "pt")
    found = load_discriminator(tmp_path / "d.safetensors", 64, 3, 1)
    assert found.config == {"channels": 8, "layers": 2, "norm": norm}
    for name, value in found.state_dict().items():
        assert (value.numpy() == layer.state_dict()[name].numpy() + name.endswith("_mean")).all(), name
    with pytest.raises(ModelError, match="holds no discriminator of patches"):
        write_safetensors(tmp_path / "x.safetensors", {"main.0.bias": np.zeros(2, np.float32)}, "pt")
        load_discriminator(tmp_path / "x.safetensors", 64, 3, 1)


def test_a_new_one_is_that_of_compvis_but_for_its_norms():
    layer = load_discriminator(None, 64, 3, 1)
    assert sum(p.size for p in layer.parameters()) == 2_765_633
    assert math.isclose(float(layer.main[2].weight.std()), 0.02, rel_tol=0.05)
    assert layer(paddle.zeros([1, 3, 256, 256])).shape == [1, 1, 30, 30]
