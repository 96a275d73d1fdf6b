"""Train a text-to-image latent diffusion model with the hand-written loop.

python -u examples/train_txt2img_laion400m_no_trainer.py --output_dir OUT --file_list LIST [flags]
"""

import sys

from ppldm.training.early import check_early
from ppldm.utils.entry import entry

if __name__ == "__main__":  # worker processes import this file
    with entry(lambda: check_early(sys.argv[1:])):
        from ppldm.training.arguments import parse_arguments
        from ppldm.training.loop import run_loop
        from ppldm.training.text_to_image import prepare_text_to_image

        run_loop(prepare_text_to_image(*parse_arguments(sys.argv[1:], loop=True)))
