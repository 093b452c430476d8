"""`python -m evals.gsm8k`: GSM8K with and without a calculator, over any OpenAI server.

    options -> problems and prompts -> samples as they finish -> summary

The scoring rules can be imported from here.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from evals.client import RequestFailed, first_model, wait_healthy
from evals.config import Config, EvalError, Mode
from evals.few_shot import load_few_shot
from evals.options import in_ray_job, parse_args
from evals.problems import load_problems, locate
from evals.progress import Progress
from evals.prompts import Prompts, load_variants
from evals.provenance import facts
from evals.results import Results, read_samples
from evals.rewards import Reward, load_rewards, rewarded
from evals.rollouts import connect, run_all
from evals.scoring import flexible_match, is_correct, strict_match
from evals.screen import render, where
from evals.summary import conclude

__all__ = ["flexible_match", "is_correct", "main", "strict_match"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs an evaluation.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 1 if a sample failed or is missing, after all that was answered is written; 2 if the run could not
        start.
    """
    config = parse_args(argv)
    try:
        if config.wait_healthy:
            wait_healthy(config.base_url, config.wait_healthy)
        incomplete = generate(config)
        return report(config.results_dir, incomplete)
    except (EvalError, RequestFailed) as error:
        print(f"evals.gsm8k: {error}", file=sys.stderr)
        return 2


def generate(config: Config) -> str | None:
    """Asks all that is to be asked and writes what comes, from the choice of problems to the last sample.

    Returns:
        None, or why it ended early.

    Raises:
        EvalError: the run could not start.
        RequestFailed: no server.
    """
    config = config.model_copy(update={"model": config.model or first_model(config.base_url)})
    rewards = load_rewards(config.rewards)
    connect()
    problems = load_problems(config)
    few_shot = load_few_shot(config, set(problems["id"].to_pylist()))
    prompts = Prompts(load_variants(config.variants, config.variants_file), few_shot)
    told = facts(config, prompts, locate(config.dataset, config.split), problems)
    with (Results.resume if config.resume else Results.create)(config.results_dir, told) as results:
        if in_ray_job():
            print(f"evals.gsm8k: results go to {where(config.results_dir)}", flush=True)
        return run(config, problems, prompts, rewards, results)


def report(directory: Path, incomplete: str | None = None) -> int:
    """Writes and prints what the samples of a results directory come to.

    Args:
        directory: the results.
        incomplete: why the run ended early, if it did.

    Returns:
        0; 1 if a sample failed or is missing.

    Raises:
        EvalError: the directory holds no run.
    """
    summary = conclude(directory, incomplete)
    print(render(summary, directory))
    return verdict(summary)


def run(config: Config, problems: pa.Table, prompts: Prompts, rewards: list[Reward], results: Results) -> str | None:
    """Runs the modes one after the other, so that each has its own tokens per second.

    Returns:
        None, or why it ended early.
    """
    try:
        for mode in config.modes:
            run_mode(mode, config, problems, prompts, rewards, results)
    except KeyboardInterrupt:
        return "interrupted"
    except ray.exceptions.RayError as error:
        return f"Ray: {str(error).strip().splitlines()[-1]}"
    except EvalError as error:  # a user's reward
        return str(error)
    return None


def run_mode(
    mode: Mode, config: Config, problems: pa.Table, prompts: Prompts, rewards: list[Reward], results: Results
) -> None:
    """Writes and counts the samples of one mode as they finish, behind one progress bar."""
    with Progress(mode, problems.num_rows * len(config.variants)) as progress:
        for sample in read_samples(results.directory, mode):
            progress.earlier(sample)
        for sample in run_all(problems, mode, config, prompts, results.has):
            sample = rewarded(sample, rewards)
            results.add(sample)
            progress.add(sample)


def verdict(summary: dict[str, Any]) -> int:
    """The exit code, and on stderr the reason where it is not 0."""
    counts = summary["counts"]
    reasons = [f"{counts['failed']} of {counts['samples']} samples failed"] if counts["failed"] else []
    reasons += [str(summary["incomplete"])] if summary["incomplete"] else []
    if reasons:
        print(f"\nevals.gsm8k: {'; '.join(reasons)}", file=sys.stderr)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
