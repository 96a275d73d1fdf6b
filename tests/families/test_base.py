"""Families are found by their files, and named nearest when they are not."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ppldm.config.data import DataOptions
from ppldm.families.base import DEFAULT_FAMILY, check_family, get_family, list_families
from ppldm.utils.errors import ConfigError


def test_families_of_the_folder():
    assert list_families() == [
        *(DEFAULT_FAMILY, "autoencoder", "cascade_autoencoder", "cascade_controlnet", "cascade_decoder"),
        *("cascade_prior", "controlnet", "dit", "microdit", "sd3", "sdxl", "single_stream", "stable_diffusion"),
        "uvit",
    ]
    for name in list_families():
        family = get_family(name)
        assert family.name == name == family.Config.family and family.components


@pytest.mark.parametrize(
    "name, hint",
    [
        *[("ldn", "did you mean ldm"), ("l", "")],
        (
            "base",
            "known: ldm, .*, cascade_decoder, cascade_prior, controlnet, dit, microdit, sd3, sdxl, .*, uvit",
        ),
    ],
)
def test_an_unknown_family_is_an_error(name, hint):
    with pytest.raises(ConfigError, match=f"family {name} is not known; .*{hint}"):
        get_family(name)


def test_what_a_family_does_not_take_is_refused(tiny):
    family = get_family("autoencoder")
    config, data = family.Config(vae_config_file=tiny.config("vae")), DataOptions(resolution=32)
    taken = dict.fromkeys(family.unsupported) | {"bf16": False, "fp16_opt_level": "O2"}
    check_family(config, data, SimpleNamespace(**taken))
    for name in family.unsupported:
        with pytest.raises(ConfigError, match=f"--{name} is not supported for autoencoders; omit it"):
            check_family(config, data, SimpleNamespace(**taken | {name: 0.1}))
    with pytest.raises(ConfigError, match="--fp16_opt_level O2 is not supported for autoencoders; use O1"):
        check_family(config, data, SimpleNamespace(**taken | {"bf16": True}))


@pytest.mark.cold
def test_families_are_read_without_paddle():
    code = (
        "import sys\nfrom ppldm.families.base import get_family, list_families\n"
        "for name in list_families(): get_family(name).Config()\n"
        "assert not {'paddle', 'paddlenlp', 'ppdiffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
