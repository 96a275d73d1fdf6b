"""Train a text-to-image latent diffusion model under PaddleNLP's Trainer.

python -u examples/train_txt2img_laion400m_trainer.py --do_train --output_dir OUT --file_list LIST [flags]
"""

import sys

from ppldm.training.early import check_early
from ppldm.utils.entry import entry

if __name__ == "__main__":  # worker processes import this file
    with entry(lambda: check_early(sys.argv[1:], needs_do_train=True)):
        from ppldm.training.arguments import parse_arguments
        from ppldm.training.text_to_image import prepare_text_to_image
        from ppldm.training.trainer import run_trainer

        run_trainer(prepare_text_to_image(*parse_arguments(sys.argv[1:], loop=False)))
