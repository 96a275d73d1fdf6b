"""What can be refused at once: paths that are not there, and the Trainer script without --do_train.

The whole command line is read by `training.arguments`, which needs PaddleNLP and with it many seconds. A mistyped path
should not wait for that. Nothing heavy is imported here.
"""

import argparse
from pathlib import Path

from ..config.arguments import KNOWN_MODELS
from ..data.text.tokenizer import check_tokenizer
from ..utils.errors import ConfigError
from ..weights.fetch import check_name
from .network_flags import check_networks


def check_early(argv: list[str], needs_do_train: bool = False) -> None:
    """Raises ConfigError, ModelError for what no run can be made of; nothing where help is asked for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--do_train", nargs="?", const="true")
    for names, _ in _CHECKS:
        parser.add_argument(*(f"--{name}" for name in names), nargs="?")
    try:
        given = vars(parser.parse_known_args(argv)[0])
    except argparse.ArgumentError:
        return  # the whole parser says what is wrong
    if given["help"]:
        return
    for names, check in _CHECKS:
        if given[names[0]]:
            check(names[0], given[names[0]])
    if needs_do_train and given["do_train"] is None:
        raise ConfigError("nothing to do: add --do_train")
    check_networks(given)


def _check_file(flag: str, value: str) -> None:
    if not Path(value).is_file():
        what = "is a folder" if Path(value).is_dir() else "is not there"
        raise ConfigError(f"--{flag} {value} {what}; give the path of a file")


def _check_model(_flag: str, value: str) -> None:
    if value not in KNOWN_MODELS:
        check_name(value)


def _check_tokenizer(_flag: str, value: str) -> None:
    check_tokenizer(value)


# A flag with its other spellings, and what its value must pass.
_CHECKS = (
    (("file_list",), _check_file),
    (("validation_file_list",), _check_file),
    (("text_encoder_config_file",), _check_file),
    (("unet_config_file",), _check_file),
    (("vae_config_file",), _check_file),
    (("model_name_or_path", "pretrained_model_name_or_path"), _check_model),
    (("vae_name_or_path",), _check_model),
    (("unet_name_or_path",), _check_model),
    (("pretrained_text_encoder_name",), _check_model),
    (("tokenizer_name",), _check_tokenizer),
)
