"""`python -m ppldm` is `ppldm`."""

from .cli.main import main

main()
