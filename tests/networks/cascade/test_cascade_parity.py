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

from ppldm.networks.build import build_effnet  # noqa: E402
from ppldm.networks.cascade.unet import CascadeUNet  # noqa: E402
from ppldm.networks.configs import read_new_config  # noqa: E402
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
    ours = build_effnet(read_new_config("effnet", "effnet_v2_s", ""), 0)
    fill_layer(ours, arrays_of(theirs), "the table", "ours")
    pixels = np.random.default_rng(2).random([1, 3, 64, 96], np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(pixels)).numpy()
    found = ours(paddle.to_tensor(pixels)).numpy()
    assert found.shape == expected.shape == (1, 16, 2, 3)
    assert np.abs(found - expected).max() < BAR * np.abs(expected).max()
