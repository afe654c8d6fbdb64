"""`python -m cbrs` is the command `cbrs`."""

import sys

from cbrs.cli import main

if __name__ == "__main__":
    sys.exit(main())
