"""ppldm's launcher, which waits seconds for ranks and machines that cannot end any more, and not ten and more: python
impatient.py ppldm.training.distributed.launch [its flags]."""

import sys
import tempfile

from ppldm.training.distributed import launch

if __name__ == "__main__":
    launch.GRACE_SECONDS, launch.BEAT_SECONDS = 2.0, 0.2
    del sys.argv[1]
    with launch.exit_on_error(), tempfile.TemporaryDirectory() as notes:
        launch.run(notes)
