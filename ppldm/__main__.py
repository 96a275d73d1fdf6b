"""`python -m ppldm` is `ppldm`."""

from .cli.main import main

if __name__ == "__main__":  # worker processes import this file
    main()
