"""`python -m evals.report DIR`: write a run's report.html again."""

import sys

from evals.report.page import main

if __name__ == "__main__":
    sys.exit(main())
