"""`python -m evals.labels RESULTS`: write the table of labels."""

import sys

from evals.labels.command import main

if __name__ == "__main__":
    sys.exit(main())
