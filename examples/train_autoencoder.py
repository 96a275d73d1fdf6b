"""Train an AutoencoderKL on part files; its folder OUT/vae is what --vae_name_or_path takes.

python -u examples/train_autoencoder.py --output_dir OUT --file_list LIST --vae_config_file CONFIG.json [flags]
"""

import sys

from ppldm.training.early import check_early
from ppldm.utils.entry import entry

if __name__ == "__main__":  # worker processes import this file
    with entry(lambda: check_early(sys.argv[1:])):
        from ppldm.config.arguments import AutoencoderArguments
        from ppldm.training.arguments import parse_arguments
        from ppldm.training.autoencoder import prepare_autoencoder
        from ppldm.training.loop import run_loop

        run_loop(prepare_autoencoder(*parse_arguments(sys.argv[1:], loop=True, model_group=AutoencoderArguments)))
