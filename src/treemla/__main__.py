"""`python -m treemla VERB`: the one command line; see `treemla.gate.cli`."""

import sys

from treemla.gate.cli import main

if __name__ == "__main__":
    sys.exit(main())
