"""Train an AutoencoderKL on part files; its folder OUT/vae is what --vae_name_or_path takes.

python -u examples/train_autoencoder.py --output_dir OUT --file_list LIST --vae_config_file CONFIG.json [flags]
"""

import sys

from ppldm.utils.processes.signals import answer_interrupts

if __name__ == "__main__":  # worker processes import this file
    answer_interrupts()  # Ctrl-C is one line, during imports too
    from ppldm.families.autoencoder import AutoencoderConfig
    from ppldm.training.commands.train import run_training

    run_training(sys.argv[1:], loop=True, config=AutoencoderConfig)
