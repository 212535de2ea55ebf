"""`python -m fcljax` is the command line."""

import sys

from fcljax.cli import main

sys.exit(main())
