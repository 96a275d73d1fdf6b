"""The same numbers, names and shapes as diffusers' StableCascadeUNet and as EfficientNetV2-S in PyTorch.

Bar: 1e-4 of the largest absolute difference.
"""

import math

import needs
import numpy as np
import paddle
import pytest

needs.need("parity")

import diffusers  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from ppldm.families.cascade import control_misfits  # noqa: E402
from ppldm.networks.build import build_network  # noqa: E402
from ppldm.networks.cascade.control import CascadeControlNet  # noqa: E402
from ppldm.networks.cascade.unet import CascadeUNet  # noqa: E402
from ppldm.networks.configs import check_config, read_new_config  # noqa: E402
from ppldm.weights.components import from_torch, turn_linear  # noqa: E402
from ppldm.weights.fill import fill_layer, parameter_shapes  # noqa: E402

BAR = 1e-4
RES, TIME, ATTN = "SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"
PRIOR = {
    "timestep_ratio_embedding_dim": 16, "conditioning_dim": 32, "block_out_channels": [32, 24],
    "num_attention_heads": [2, 3], "down_num_layers_per_block": [1, 2], "up_num_layers_per_block": [2, 1],
    "block_types_per_layer": [[RES, TIME, ATTN]] * 2, "clip_text_in_channels": 24, "clip_text_pooled_in_channels": 20,
    "clip_image_in_channels": 12, "switch_level": [False],
}  # fmt: skip
DECODER = {
    "in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 17, "patch_size": 2, "conditioning_dim": 32,
    "block_out_channels": [16, 24, 32], "num_attention_heads": [-1, 2, 4], "down_num_layers_per_block": [1, 1, 2],
    "up_num_layers_per_block": [2, 1, 1], "down_blocks_repeat_mappers": [1, 2, 1],
    "up_blocks_repeat_mappers": [3, 2, 2], "block_types_per_layer": [[RES, TIME], [RES, TIME], [RES, TIME, ATTN]],
    "clip_text_pooled_in_channels": 20, "effnet_in_channels": 16, "pixel_mapper_in_channels": 3,
    "dropout": [0.0, 0.0, 0.1], "timestep_conditioning_type": ["sca"],
}  # fmt: skip
LATENTS, CAPTION = {"sample": [2, 16, 6, 5]}, {"clip_text_pooled": [2, 1, 20]}
PICTURE, WORDS = {"clip_img": [2, 2, 12]}, {"clip_text": [2, 7, 24]}
CASES = {
    "prior": (PRIOR, LATENTS | CAPTION),
    "prior, words and picture": (PRIOR, LATENTS | CAPTION | WORDS | PICTURE),
    "prior, words alone are not seen": (PRIOR, LATENTS | CAPTION | WORDS),
    "prior, levels of two sizes": (PRIOR | {"switch_level": [True]}, {"sample": [2, 16, 7, 6]} | CAPTION),
    "prior, both conditions": (
        PRIOR, {"sample": [1, 16, 4, 4], "clip_text_pooled": [1, 1, 20], "sca": [1], "crp": [1]}
    ),
    "prior, no self-attention": (PRIOR | {"self_attn": [False, True], "kernel_size": 5}, LATENTS | CAPTION),
    "decoder": (DECODER, {"sample": [2, 4, 16, 24]} | CAPTION),
    "decoder, effnet": (DECODER, {"sample": [2, 4, 18, 22], "effnet": [2, 16, 3, 4]} | CAPTION),
    "decoder, all": (DECODER, {"sample": [1, 4, 16, 16], "effnet": [1, 16, 8, 8], "pixels": [1, 3, 5, 6], "sca": [1],
                               "clip_text_pooled": [1, 1, 20]}),
}  # fmt: skip


def randomised(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator)
                scale = 0.3 if value.ndim < 2 else 1.5 / math.sqrt(value[0].numel())
                value.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn * scale)
    return network.eval()


def arrays_of(network: nn.Module) -> dict:
    return from_torch({name: value.numpy() for name, value in network.state_dict().items()})


@pytest.mark.parametrize("case", CASES)
def test_the_same_prediction_and_gradients(case):
    config, shapes = CASES[case]
    theirs, ours = randomised(diffusers.StableCascadeUNet(**config)), CascadeUNet(**config)
    fill_layer(ours, arrays_of(theirs), "diffusers", "ours")
    ours.eval()
    rng = np.random.default_rng(3)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items() if len(shape) > 1}
    drawn |= {name: rng.random(1, np.float32) for name in shapes.keys() & {"sca", "crp"}}
    drawn["timestep_ratio"] = rng.random(len(drawn["sample"]), np.float32)
    expected = theirs(**{name: torch.tensor(value) for name, value in drawn.items()}).sample
    found = ours(**{name: paddle.to_tensor(value) for name, value in drawn.items()})
    assert found.shape == list(expected.shape) and expected.abs().max() > 0.5
    assert np.abs(found.numpy() - expected.detach().numpy()).max() < BAR
    leads = rng.standard_normal(found.shape, np.float32)
    (expected * torch.tensor(leads)).mean().backward()
    (found * paddle.to_tensor(leads)).mean().backward()
    gradients = turn_linear({n: p.grad.numpy() for n, p in theirs.named_parameters() if p.grad is not None})
    for name, value in ours.named_parameters():
        if name in gradients:
            assert np.abs(value.grad.numpy() - gradients[name]).max() < BAR, name
        else:
            assert value.grad is None or not value.grad.any(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind, tensors, parameters",  # counted on the published code
    [
        ("cascade_c_3b", "cascade_prior", 1294, 3_589_103_632),
        ("cascade_c_1b", "cascade_prior", 654, 1_030_785_040),
        ("cascade_b_3b", "cascade_decoder", 1454, 1_562_941_136),
        ("cascade_b_700m", "cascade_decoder", 826, 699_471_248),
    ],
)
def test_released_sizes_match_key_by_key(name, kind, tensors, parameters):
    config = read_new_config(kind, name, "")
    with torch.device("meta"):
        theirs = diffusers.StableCascadeUNet(**config)
    linear = {f"{key}.weight" for key, layer in theirs.named_modules() if isinstance(layer, nn.Linear)}
    expected = {key: list(p.shape)[:: -1 if key in linear else 1] for key, p in theirs.named_parameters()}
    found = parameter_shapes(kind, config)
    assert found == expected
    # The published code keeps query, key and value in one matrix.
    fused = sum(key.endswith(("to_k.weight", "to_k.bias", "to_v.weight", "to_v.bias")) for key in found)
    assert (len(found) - fused, sum(map(math.prod, found.values()))) == (tensors, parameters)


# EfficientNetV2-S (arXiv:2104.00298, table 4) as torchvision names it: operator, expansion, stride, channels, layers.
TABLE = [("fused", 1, 1, 24, 2), ("fused", 4, 2, 48, 4), ("fused", 4, 2, 64, 4), ("mb", 4, 2, 128, 6),
         ("mb", 6, 1, 160, 9), ("mb", 6, 2, 256, 15)]  # fmt: skip


def convolution(channels, out, kernel, stride=1, groups=1, activation=True):
    layers = [nn.Conv2d(channels, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
              nn.BatchNorm2d(out, eps=1e-3)]  # fmt: skip
    return nn.Sequential(*layers, *[nn.SiLU()] * activation)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        scale = nn.functional.adaptive_avg_pool2d(x, 1)
        return torch.sigmoid(self.fc2(nn.functional.silu(self.fc1(scale)))) * x


class Bottleneck(nn.Module):
    def __init__(self, kind, channels, out, expansion, stride):
        super().__init__()
        wide, self.adds = channels * expansion, stride == 1 and channels == out
        if kind == "fused" and expansion == 1:
            layers = [convolution(channels, out, 3, stride)]
        elif kind == "fused":
            layers = [convolution(channels, wide, 3, stride), convolution(wide, out, 1, activation=False)]
        else:
            layers = [convolution(channels, wide, 1), convolution(wide, wide, 3, stride, groups=wide),
                      SqueezeExcitation(wide, channels // 4), convolution(wide, out, 1, activation=False)]  # fmt: skip
        self.block = nn.Sequential(*layers)

    def forward(self, x):
        return self.block(x) + x if self.adds else self.block(x)


class ReferenceEncoder(nn.Module):
    def __init__(self, table, last=1280, first=24):
        super().__init__()
        stages, channels = [convolution(3, first, 3, 2)], first
        for kind, expansion, stride, out, depth in table:
            steps = [stride] + [1] * (depth - 1)
            stages.append(nn.Sequential(*[
                Bottleneck(kind, out if number else channels, out, expansion, step) for number, step in enumerate(steps)
            ]))  # fmt: skip
            channels = out
        self.backbone = nn.Sequential(*stages, convolution(channels, last, 1))
        self.mapper = nn.Sequential(nn.Conv2d(last, 16, 1, bias=False), nn.BatchNorm2d(16, affine=False))

    def forward(self, pixels):
        mean, std = (torch.tensor(one).reshape(3, 1, 1) for one in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        return self.mapper(self.backbone((pixels - mean) / std))


@pytest.mark.slow
def test_the_encoder_is_efficientnet_v2_s():
    theirs = randomised(ReferenceEncoder(TABLE))
    # Of the published table: 21,458,488 with a classifier of 1,281,000; and the convolution behind it.
    assert sum(p.numel() for p in theirs.parameters()) == 21_458_488 - 1_281_000 + 1280 * 16
    ours = build_network("effnet", read_new_config("effnet", "effnet_v2_s", ""), 0)
    fill_layer(ours, arrays_of(theirs), "the table", "ours")
    pixels = np.random.default_rng(2).random([1, 3, 64, 96], np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(pixels)).numpy()
    found = ours(paddle.to_tensor(pixels)).numpy()
    assert found.shape == expected.shape == (1, 16, 2, 3)
    assert np.abs(found - expected).max() < BAR * np.abs(expected).max()


SMALL = [("fused", 1, 1, 8, 1), ("fused", 4, 2, 8, 2), ("fused", 4, 2, 16, 1), ("mb", 4, 2, 24, 1), ("mb", 6, 1, 24, 1),
         ("mb", 6, 2, 32, 1)]  # fmt: skip


class ControlResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        norms = [nn.LayerNorm(channels), nn.LayerNorm(channels)]
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in norms]
        first, second = zip(norms, convolutions, strict=True)
        self.blocks = nn.ModuleList([first[0], nn.GELU(), first[1], second[0], nn.GELU(), second[1]])

    def forward(self, x):
        inner = x
        for layer in self.blocks:
            is_norm = isinstance(layer, nn.LayerNorm)
            inner = layer(inner.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if is_norm else layer(inner)
        return x + inner


class ReferenceControl(nn.Module):
    """As the published trainer describes its control network; `large` of other widths."""

    def __init__(self, bottleneck, channels, blocks, projected):
        super().__init__()
        if bottleneck == "effnet":
            width, self.backbone = 40, ReferenceEncoder(SMALL, last=40, first=8).backbone
            if channels != 3:
                self.backbone[0][0] = nn.Conv2d(channels, 8, kernel_size=3, stride=2, bias=False)
        elif bottleneck == "simple":
            width, wide = channels, 4 * channels
            layers = [nn.Conv2d(width, wide, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(wide, width, 3, padding=1)]
            self.backbone = nn.Sequential(*layers)
        else:
            width, steps = 24, [ControlResBlock(12) for _ in range(2)]
            first = [nn.Conv2d(channels, 48, 1), nn.LeakyReLU(0.2), nn.Conv2d(48, 12, 1)]
            self.backbone = nn.Sequential(*first, *steps, nn.Conv2d(12, width, 1))
        self.projections = nn.ModuleList([
            nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.LeakyReLU(0.2),
                          nn.Conv2d(width, projected, 1, bias=False))
            for _ in blocks
        ])  # fmt: skip

    def forward(self, seen):
        seen = self.backbone(seen)
        return [projection(seen) for projection in self.projections]


@pytest.mark.parametrize(
    "bottleneck, channels", [("effnet", 3), ("effnet", 1), ("effnet", 4), ("simple", 4), ("large", 16)]
)
def test_the_control_network_and_its_gradients_are_the_published_ones(bottleneck, channels):
    blocks = [0, 2, 5]
    theirs = randomised(ReferenceControl(bottleneck, channels, blocks, 20))
    for layer in theirs.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.add_(1)  # so that much of the picture comes out
    ours = CascadeControlNet(channels, 20, blocks, bottleneck, [8, 8, 8, 16, 24, 24, 32, 40], [1, 2, 1, 1, 1, 1],
                             [48, 12, 24], 2)  # fmt: skip
    fill_layer(ours, arrays_of(theirs), "the reference", "ours")
    ours.train()  # batch norms keep to their statistics, and learn weights
    seen = np.random.default_rng(5).random((2, channels, 70, 64), np.float32)
    expected, found = theirs(torch.tensor(seen)), ours(paddle.to_tensor(seen))
    assert [*found] == blocks
    rng = np.random.default_rng(6)
    leads = [rng.standard_normal(one.shape, np.float32) for one in expected]
    for one, other in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.detach().numpy(), rtol=1e-4, atol=BAR)
    sum((one * torch.tensor(lead)).mean() for one, lead in zip(expected, leads, strict=True)).backward()
    sum((one * paddle.to_tensor(lead)).mean() for one, lead in zip(found.values(), leads, strict=True)).backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    own = {name: parameter.grad.numpy() for name, parameter in ours.named_parameters() if not parameter.stop_gradient}
    assert own.keys() == gradients.keys() and max(np.abs(one).max() for one in own.values()) > 0.003
    for name, gradient in gradients.items():
        np.testing.assert_allclose(own[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sizes", [[False], [True]])
def test_a_control_network_adds_before_each_of_its_blocks(sizes):
    """Blocks are counted as they are used: down and up, those that are used again a second time."""
    config = PRIOR | {"block_out_channels": [24, 24], "num_attention_heads": [2, 3], "switch_level": sizes}
    config |= {"down_blocks_repeat_mappers": [1, 2], "up_blocks_repeat_mappers": [2, 1]}
    theirs, ours = randomised(diffusers.StableCascadeUNet(**config)), CascadeUNet(**config)
    fill_layer(ours, arrays_of(theirs), "diffusers", "ours")
    ours.eval()
    rng, shapes = np.random.default_rng(3), {"sample": [2, 16, 7, 6]} | CAPTION
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    drawn["timestep_ratio"] = rng.random(2, np.float32)
    plain = theirs(**{name: torch.tensor(value) for name, value in drawn.items()}).sample
    control = {number: rng.standard_normal((2, 24, 3, 4), np.float32) for number in (0, 2, 4, 6, 8, 9)}
    numbers = iter(range(100))

    def add(_block, given):
        added = control.get(next(numbers))
        if added is None:
            return None
        size = {"size": given[0].shape[2:], "mode": "bilinear", "align_corners": True}
        return given[0] + nn.functional.interpolate(torch.tensor(added), **size), *given[1:]

    for block in theirs.modules():
        if type(block).__name__ == RES:
            block.register_forward_pre_hook(add)
    expected = theirs(**{name: torch.tensor(value) for name, value in drawn.items()}).sample
    given = {number: paddle.to_tensor(value) for number, value in control.items()}
    found = ours(**{name: paddle.to_tensor(value) for name, value in drawn.items()}, control=given)
    assert next(numbers) == 10 and (expected - plain).abs().max() > 0.5
    assert np.abs(found.numpy() - expected.detach().numpy()).max() < BAR
    own = {**config, "in_channels": 16, "out_channels": 16}
    for last, fits in ((9, True), (10, False)):
        problems = control_misfits(
            {"projection_channels": 24, "blocks": [0, last]}, check_config("cascade_prior", own, "x")
        )
        assert (not [*problems]) == fits
