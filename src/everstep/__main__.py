"""`python -m everstep`: the same as the `everstep` program."""

from __future__ import annotations

import sys

from everstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
