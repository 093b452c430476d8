"""`python -m evals.gsm8k`: GSM8K with and without a calculator, over any OpenAI server.

What it does: options -> a server -> problems and prompts -> samples as they finish -> summary
"""

import sys
from collections.abc import Sequence

from deployments.permissions import restrict
from evals.gsm8k.options import parse_args
from evals.gsm8k.stages import run_stages


def main(argv: Sequence[str] | None = None) -> int:
    """Runs an evaluation.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 1 if a sample, or activations of one, failed or are missing, after all that was answered is written; 2 if a
        stage could not do what it is to do; 130 if it was interrupted before there was anything to report.
    """
    config = parse_args(argv)
    restrict(config.results_dir)
    return run_stages(config)


if __name__ == "__main__":
    sys.exit(main())
