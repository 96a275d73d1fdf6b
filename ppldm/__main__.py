"""`python -m ppldm` is `ppldm`."""

from .cli import main

main()
