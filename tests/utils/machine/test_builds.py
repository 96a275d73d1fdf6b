"""Which build of Paddle a machine needs: laws over every driver, card and pair of cards."""

from itertools import combinations_with_replacement

import pytest

from ppldm.utils.errors import ConfigError
from ppldm.utils.machine.nvidia_smi import BUILDS, Gpu, choose_build, parse_gpus
from ppldm.utils.machine.setup_plan import choose_device

DRIVERS = ["390.48", "450.80.01", "450.80.02", "470.82.01", "535.183.01", "550.54.13", "550.54.14", "550.90",
           "580.65.05", "580.65.06", "600.1"]  # fmt: skip
CARDS = [None, 3.0, 3.5, 5.0, 6.1, 7.0, 7.5, 8.0, 9.0, 10.0, 12.0, 12.1, 13.0]


def test_the_chosen_build_runs_on_every_card_and_no_preferred_one_does():
    for driver in DRIVERS:
        for cards in combinations_with_replacement(CARDS, 2):
            gpus = [Gpu("card", driver, card) for card in cards]
            fitting = [build for build in BUILDS if all(build.fits(gpu) for gpu in gpus)]
            if fitting:
                assert choose_build(gpus) == fitting[0]
                assert choose_build(gpus, fitting[0].cuda) == fitting[0]
            else:
                with pytest.raises(ConfigError, match="driver.*--device cpu"):
                    choose_build(gpus)


@pytest.mark.parametrize(
    ("driver", "card", "cuda"),
    [
        ("450.80.02", 7.0, "11.8"),
        ("550.54.13", 7.0, "11.8"),
        ("550.54.14", 7.0, "12.6"),
        ("580.65.06", 9.0, "12.6"),
        ("550.54.14", 10.0, "12.9"),
        ("580.65.06", 12.0, "12.9"),
        ("600.1", None, "12.6"),
        ("550.9", 8.0, "11.8"),  # 9 is less than 54
    ],
)
def test_choices(driver, card, cuda):
    assert choose_build([Gpu("card", driver, card)]).cuda == cuda


def test_a_build_by_name_is_checked_against_the_driver_and_the_cards():
    for build in BUILDS:
        for driver in DRIVERS:
            for card in CARDS:
                gpu = Gpu("card", driver, card)
                if build.fits(gpu):
                    assert choose_device("gpu", build.cuda, [gpu], "3.11")[0] == build.name
                else:
                    with pytest.raises(ConfigError, match=f"--cuda {build.cuda} on card, driver {driver}: "):
                        choose_device(None, build.cuda, [gpu], "3.11")
        assert choose_device(None, build.cuda, [], "3.11")[0] == build.name


def test_no_gpu_and_no_wish_is_the_cpu():
    assert choose_device(None, None, [], "3.11")[0] == "cpu"
    assert choose_device("gpu", None, [], "3.11")[0] == BUILDS[0].name
    assert choose_device("cpu", None, [Gpu("card", "550.54.14", 8.0)], "3.11")[0] == "cpu"


def test_lines_of_nvidia_smi():
    text = "A100-SXM4-40GB, 40960 MiB, 550.54.14, 8.0\nTesla V100, 32768 MiB, 470.82.01\nGRID, 1 MiB, 550.1, [N/A]\n"
    assert parse_gpus(text) == [
        Gpu("A100-SXM4-40GB", "550.54.14", 8.0, "40960 MiB"),
        Gpu("Tesla V100", "470.82.01", None, "32768 MiB"),
        Gpu("GRID", "550.1", None, "1 MiB"),
    ]
    assert str(parse_gpus(text)[0]) == "A100-SXM4-40GB 40960 MiB, driver 550.54.14"
    for text in ("", "No devices were found\n", "NVIDIA-SMI has failed, because, it\n"):
        assert parse_gpus(text) == []
