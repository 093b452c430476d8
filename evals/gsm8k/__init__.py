"""`python -m evals.gsm8k`: GSM8K with and without a calculator, its options, stages and summary.

What is asked is in `evals.task`, what is kept in `evals.results`.
"""

import deployments.installed  # noqa: F401 - before the packages that it asks for
