"""Train a text-to-image latent diffusion model under PaddleNLP's Trainer.

python -u examples/train_txt2img_laion400m_trainer.py --do_train --output_dir OUT --file_list LIST [flags]
"""

import sys

from ppldm.utils.processes.signals import answer_interrupts

if __name__ == "__main__":  # worker processes import this file
    answer_interrupts()  # Ctrl-C is one line, during imports too
    from ppldm.families.ldm import LdmConfig
    from ppldm.training.commands.train import run_training

    run_training(sys.argv[1:], loop=False, config=LdmConfig)
