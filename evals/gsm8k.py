"""`python -m evals.gsm8k`: GSM8K with and without a calculator, over any OpenAI server.

    config -> problems -> samples as they finish -> report

The scoring rules can be imported from here.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import ray
from tqdm import tqdm

from evals.client import RequestFailed, first_model, wait_healthy
from evals.config import Config, EvalError, in_ray_job, parse_args
from evals.problems import load_problems
from evals.report import ActivationTally, ResultsWriter, Tally, summarize
from evals.rollouts import connect, run_all
from evals.scoring import flexible_match, is_correct, strict_match
from evals.screen import render
from evals.serving import serving
from evals.smoke import smoke
from evals.trajectory import Problem

__all__ = ["flexible_match", "is_correct", "main", "strict_match"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs an evaluation.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 1 if a sample failed or is missing, after all that was answered is written; 2 if the run could not
        start.
    """
    try:
        with serving(parse_args(argv)) as config:
            if config.wait_healthy:
                wait_healthy(config.base_url, config.wait_healthy)
            config = config.model_copy(update={"model": config.model or first_model(config.base_url)})
            if config.smoke:
                smoke(config)
                return 0
            connect()
            problems = load_problems(config)
            with ResultsWriter(config.results_dir) as writer:
                return run(config, problems, writer)
    except (EvalError, RequestFailed) as error:
        print(f"evals.gsm8k: {error}", file=sys.stderr)
        return 2


def run(config: Config, problems: list[Problem], writer: ResultsWriter) -> int:
    """Runs the modes one after the other, so that each has its own tokens per second, and reports."""
    started = datetime.now(UTC)
    if in_ray_job():
        print(f"evals.gsm8k: in a Ray job; results go to {writer.directory}", flush=True)
    tallies = [Tally(mode) for mode in config.modes]
    activations = ActivationTally(config.session_id) if config.collect_activations else None
    incomplete = None
    try:
        for tally in tallies:
            run_mode(config, problems, writer, tally, activations)
    except KeyboardInterrupt:
        incomplete = "interrupted"
    except ray.exceptions.RayError as error:
        incomplete = f"Ray: {str(error).strip().splitlines()[-1]}"
    summary = summarize(config, tallies, activations, problems=len(problems), started=started, incomplete=incomplete)
    writer.finish(summary)
    print(render(summary, writer.directory, activations.example if activations else None))
    return _verdict(summary["counts"], incomplete)


def run_mode(
    config: Config,
    problems: list[Problem],
    writer: ResultsWriter,
    tally: Tally,
    activations: ActivationTally | None,
) -> None:
    """Writes and counts the samples of one mode as they finish, behind one progress bar."""
    with tqdm(total=len(problems), desc=tally.mode, unit="problem", dynamic_ncols=True) as bar:
        for sample in run_all(problems, tally.mode, config):
            writer.add(sample)
            tally.add(sample)
            if activations:
                activations.add(sample)
            if sample.error:
                bar.write(f"{sample.id} failed: {sample.error}", file=sys.stderr)
            if tally.accuracy is not None:
                bar.set_postfix(accuracy=f"{tally.accuracy:.1%}", refresh=False)
            bar.update()


def _verdict(counts: dict[str, int], incomplete: str | None) -> int:
    """The exit code, and on stderr the reason where it is not 0."""
    reasons = [f"{counts['failed']} of {counts['samples']} samples failed"] if counts["failed"] else []
    reasons += [f"{counts['missing']} samples are missing"] if counts["missing"] else []
    if incomplete:
        reasons.append(incomplete)
    if reasons:
        print(f"\nevals.gsm8k: {'; '.join(reasons)}", file=sys.stderr)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
