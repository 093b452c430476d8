"""The stages of an evaluation: a server, the answers, and what is made of them.

    deploy -> generate -> report

`--stages` runs some of them; what one needs of an earlier one lies in the results directory, or is a server that
answers.
"""

import sys
from contextlib import nullcontext
from typing import Any

import ray
from tqdm import tqdm

from deployments.interrupts import terminate_as_interrupt
from evals.config import Config, EvalError, Mode, Stage, in_ray_job
from evals.gsm8k.preparation import EvaluationInputs, prepare
from evals.gsm8k.summary import conclude, summarize
from evals.report.screen import not_stored, render, where
from evals.results.provenance import MAY_DIFFER, changed
from evals.results.results import Results, check_new, read_config, read_samples
from evals.server.answers import RequestFailed
from evals.server.server_process import serving, tail_of
from evals.task.rollouts import connect, run_all
from evals.task.steering import asked
from evals.task.trajectory import Sample


def run_stages(config: Config) -> int:
    """Runs the stages that the options name, and tells on stderr why one failed.

    Returns:
        0; 1 if a sample, or activations of one, failed or are missing; 2 if a stage failed; 130 if it was interrupted
        before the report.
    """
    terminate_as_interrupt()
    stage: Stage = "deploy"
    try:
        if "generate" in config.stages and not config.resume:
            check_new(config.results_dir)  # before a server starts for nothing
        with serving(config) if "deploy" in config.stages else nullcontext(config) as config:
            incomplete = None
            if "generate" in config.stages:
                stage = "generate"
                incomplete = _generate(config)
            stage = "report"
            if "report" in config.stages:
                if "generate" not in config.stages:
                    _check_same(config)
                return report(config, incomplete)
            if "generate" in config.stages:
                return _verdict(summarize(config.results_dir, incomplete))
            return 0
    except (EvalError, RequestFailed) as error:
        _say(f"{stage}: {error}{tail_of(config) if isinstance(error, RequestFailed) else ''}")
        return 2
    except OSError as error:  # a full disk, most likely: what is written is whole
        _say(f"{error}; fix this, then run again with --resume")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _generate(config: Config) -> str | None:
    """Prepares the results directory, new or resumed, and asks what has no answer yet.

    Returns:
        None, or why it ended early.
    """
    work = prepare(config, _say)
    connect()
    terminate_as_interrupt()  # joining a cluster may have replaced the handler
    if config.resume:
        results = Results.resume(config.results_dir, work.record, work.score)
        if results.again:
            _say(f"samples asked again, since they failed, were late or were not stored: {len(results.again)}")
    else:
        results = Results.create(config.results_dir, work.record)
    if in_ray_job():
        print(f"evals.gsm8k: results go to {where(config.results_dir)}", flush=True)
    with results:
        try:
            # One mode after the other, so that each has its own tokens per second.
            for mode in work.config.modes:
                _generate_mode(mode, work, results)
        except KeyboardInterrupt:
            return "interrupted"
        except ray.exceptions.RayError as error:
            return f"Ray: {str(error).strip().splitlines()[-1]}"
    return None


def _generate_mode(mode: Mode, work: EvaluationInputs, results: Results) -> None:
    """Writes and counts the samples of one mode as they finish, behind one progress bar."""
    with _Progress(mode, work.problems.num_rows * len(asked(work.config)) * work.config.epochs) as progress:
        for sample in read_samples(results.directory, mode):
            if results.has(sample.key):
                progress.add(sample, earlier=True)
        for sample in run_all(work.problems, mode, work.config, work.prompts, results.has):
            sample = work.reward(sample)
            results.add(sample)
            progress.add(sample)


class _Progress(tqdm):  # type: ignore[type-arg]  # it takes none at run time
    """The live bar of one mode: running accuracy, and tokens per second."""

    def __init__(self, mode: str, total: int) -> None:
        super().__init__(total=total, desc=mode, unit="sample", dynamic_ncols=True)
        self._answered = self._correct = self._tokens = 0

    def add(self, sample: Sample, *, earlier: bool = False) -> None:
        """Counts a sample; one of the evaluation that is resumed counts in the accuracy, not in the speed."""
        self._answered += sample.correct is not None
        self._correct += bool(sample.correct)
        if earlier:
            self.initial += 1
        else:
            self._tokens += sample.completion_tokens
        if sample.outcome == "failed" and not earlier:
            tqdm.write(f"{sample.key} failed: {sample.error}", file=sys.stderr)
        shown = {"accuracy": f"{self._correct / self._answered:.1%}"} if self._answered else {}
        seconds = max(self.format_dict["elapsed"], 1e-3)
        self.set_postfix(shown | {"tok/s": f"{self._tokens / seconds:.0f}"}, refresh=False)
        self.update()


def _check_same(config: Config) -> None:
    """Returns if a report alone is asked for with the options that the evaluation had."""
    earlier, now = (options.model_dump(mode="json") for options in (read_config(config.results_dir), config))
    if differing := changed(earlier, now, MAY_DIFFER - {"rule", "rewards", "transfer_activations"}):
        raise EvalError(
            f"{config.results_dir} holds an evaluation with different {', '.join(differing)}; leave these options out, "
            "or use --resume, which accepts some changes"
        )


def report(config: Config, incomplete: str | None) -> int:
    """Writes and prints what the samples of a results directory come to.

    Args:
        config: the options: which directory, and the server that has the activations.
        incomplete: why the evaluation ended early, if it did.

    Returns:
        0; 1 if a sample failed or is missing, or activations that were to be stored are not known to be.

    Raises:
        EvalError: the directory holds no evaluation.
    """
    summary = conclude(config.results_dir, incomplete, config.base_url)
    print(render(summary, config.results_dir))
    return _verdict(summary)


def _verdict(summary: dict[str, Any]) -> int:
    """The exit code, and on stderr the reason where it is not 0."""
    counts = summary["counts"]
    reasons = [f"{counts['failed']} of {counts['samples']} samples failed"] if counts["failed"] else []
    reasons += [str(summary["incomplete"])] if summary["incomplete"] else []
    recorded = summary["activations"]
    reasons += [not_stored(recorded)] if recorded and recorded["not_stored"] else []
    if reasons:
        print(f"\nevals.gsm8k: {'; '.join(reasons)}", file=sys.stderr)
    return 1 if reasons else 0


def _say(text: str) -> None:
    """Tells something on stderr, above a bar where there is one."""
    tqdm.write(f"evals.gsm8k: {text}", file=sys.stderr)
