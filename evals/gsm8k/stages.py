"""The stages of an evaluation: a server, what is asked, the answers, and what is made of them.

    deploy -> configure -> generate -> report

`--stages` runs some of them; what one needs of an earlier one lies in the results directory, or is a server that
answers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import ray
from tqdm import tqdm

from deployments.interrupts import terminate_as_interrupt
from evals.config import STORED, Config, EvalError, Mode
from evals.gsm8k.checks import check
from evals.gsm8k.options import in_ray_job
from evals.gsm8k.progress import Progress
from evals.gsm8k.screen import not_stored, render, where
from evals.gsm8k.smoke import smoke
from evals.gsm8k.summary import conclude, summarize
from evals.results.provenance import MAY_DIFFER, Facts, changed, default_preset, facts, sampled_as_the_model
from evals.results.results import Results, check_new, read_json, read_samples, write_views
from evals.server.answers import RequestFailed
from evals.server.server_process import serving, tail_of, wait
from evals.server.server_queries import first_model
from evals.serving_config import Stage
from evals.task import text_tools
from evals.task.few_shot import load_few_shot
from evals.task.problems import load_problems, locate
from evals.task.prompts import Prompts, load_variants
from evals.task.rewards import Rewarder, load_rewards
from evals.task.rollouts import connect, run_all
from evals.task.steering import asked
from evals.task.trajectory import Sample, scored


class EvaluationInputs(NamedTuple):
    """What is asked, all that the answers hang on."""

    config: Config  # with the model's name
    problems: pa.Table
    prompts: Prompts
    reward: Rewarder
    record: Facts

    def score(self, sample: Sample) -> Sample:
        """A sample scored and rewarded as this run does; as it is where it failed."""
        return sample if sample.outcome == "failed" else self.reward(scored(sample, self.config.rule))


def run_stages(config: Config) -> int:
    """Runs the stages that the options name, and tells on stderr why one failed.

    Returns:
        0; 1 if a sample, or activations of one, failed or are missing; 2 if a stage failed; 130 if it was interrupted
        before the report.
    """
    terminate_as_interrupt()
    try:
        if "configure" in config.stages and not config.resume and not config.smoke:
            with _stage("configure", config):
                check_new(config.results_dir)  # before a server starts for nothing
        with serving(config) if "deploy" in config.stages else nullcontext(config) as config:
            return _with_server(config)
    except StageFailed as error:
        _say(str(error))
        return 2
    except (EvalError, RequestFailed) as error:
        _say(f"deploy: {error}")
        return 2
    except OSError as error:  # a full disk, most likely: what is written is whole
        _say(f"{error}; fix this, then run again with --resume")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


class StageFailed(Exception):
    """A stage did not do what it is to do; the text names it and says why."""


@contextmanager
def _stage(stage: Stage | Literal["smoke"], config: Config) -> Iterator[None]:
    try:
        yield
    except (EvalError, RequestFailed) as error:
        may_be_the_servers = isinstance(error, RequestFailed) or stage in ("generate", "smoke")
        raise StageFailed(f"{stage}: {error}{tail_of(config) if may_be_the_servers else ''}") from error


def _with_server(config: Config) -> int:
    """All but deploy."""
    if config.smoke:
        with _stage("smoke", config):
            smoke(_named(config))
        return 0
    incomplete = None
    asks = "configure" in config.stages or "generate" in config.stages
    if asks:
        with _stage("configure", config):
            work = prepare(_named(config))
            results = _results(work)
        with _stage("generate", config), results:
            if "generate" in config.stages:
                incomplete = generate(work, results)
                with suppress(RequestFailed):  # the server may be gone by now: then nothing more is known
                    results.note_preset(default_preset(work.config))
    if "report" in config.stages:
        with _stage("report", config):
            if not asks:
                check_same(config)
            return report(config, incomplete)
    if "generate" in config.stages:
        write_views(config.results_dir)
        return _verdict(summarize(config.results_dir, incomplete))
    return 0


def _named(config: Config) -> Config:
    """The options with the model's name, once the server answers."""
    if config.wait_healthy:
        wait(config, config.wait_healthy, config.model)
    config = config.model_copy(update={"model": config.model or first_model(config.base_url)})
    return sampled_as_the_model(config)


def prepare(config: Config) -> EvaluationInputs:
    """Chooses what is asked.

    Args:
        config: the options, with the model's name.

    Raises:
        EvalError: there are no such problems, texts or rewards, or no Ray.
    """
    reward = Rewarder(load_rewards(config.rewards), _say)
    if "generate" in config.stages:
        connect()
        terminate_as_interrupt()
    chosen = load_problems(config)
    path = locate(config.dataset, config.split)
    if chosen.repeated:
        rows = f"{chosen.repeated} rows of {path} repeat a question"
        _say(f"{rows}: each question is asked once")
    few_shot = load_few_shot(config, set(chosen.problems["id"].to_pylist()))
    tools = text_tools.INSTRUCTION if config.tools == "text" and "with-tools" in config.modes else ""
    prompts = Prompts(load_variants(config.variants, config.variants_file), few_shot, system=config.system, tools=tools)
    if config.epochs > 1 and not config.temperature:
        _say(f"--epochs {config.epochs}: at temperature 0 the answers to a problem are the same")
    record = facts(config, prompts, path, chosen)
    check(config, record, prompts.messages(chosen.problems["question"][0].as_py(), config.variants[0]))
    return EvaluationInputs(config, chosen.problems, prompts, reward, record)


def _results(work: EvaluationInputs) -> Results:
    """The directory, new or gone on with."""
    config = work.config
    goes_on = config.resume or "configure" not in config.stages
    if goes_on:
        results = Results.resume(config.results_dir, work.record, work.score, work.problems["id"].to_pylist())
        if results.again and "generate" in config.stages:
            _say(f"samples asked again, since they failed, were late or were not stored: {len(results.again)}")
    else:
        results = Results.create(config.results_dir, work.record)
    if in_ray_job():
        print(f"evals.gsm8k: results go to {where(config.results_dir)}", flush=True)
    return results


def check_same(config: Config) -> None:
    """Returns if a report alone is asked for with the options that the run had.

    Raises:
        EvalError: what differs, or that there is no run.
    """
    earlier = Config.model_validate(read_json(config.results_dir / "config.json")["config"], context=STORED)
    options = (earlier.model_dump(mode="json"), config.model_dump(mode="json", exclude={"resume"}))
    if differing := changed(*options, MAY_DIFFER - {"rule", "rewards", "transfer_activations"}):
        raise EvalError(
            f"{config.results_dir} holds an evaluation with different {', '.join(differing)}; leave these options out, "
            "or use --resume, which accepts some changes"
        )


def generate(work: EvaluationInputs, results: Results) -> str | None:
    """Asks what is not answered yet, one mode after the other, so that each has its own tokens per second.

    Returns:
        None, or why it ended early.
    """
    failures, most = 0, work.config.max_failures
    try:
        for mode in work.config.modes:
            for sample in _generate_mode(mode, work, results):
                failures += sample.outcome == "failed"
                if most is not None and failures > most:
                    return f"{failures} samples failed, and --max-failures is {most}"
    except KeyboardInterrupt:
        return "interrupted"
    except ray.exceptions.RayError as error:
        return f"Ray: {str(error).strip().splitlines()[-1]}"
    return None


def _generate_mode(mode: Mode, work: EvaluationInputs, results: Results) -> Iterator[Sample]:
    """Writes and counts the samples of one mode as they finish, behind one progress bar."""
    with Progress(mode, work.problems.num_rows * len(asked(work.config)) * work.config.epochs) as progress:
        for sample in read_samples(results.directory, mode):
            if results.has(sample.key):
                progress.add(sample, earlier=True)
        for sample in run_all(work.problems, mode, work.config, work.prompts, results.has):
            sample = work.reward(sample)
            results.add(sample)
            progress.add(sample)
            yield sample


def report(config: Config, incomplete: str | None) -> int:
    """Writes and prints what the samples of a results directory come to.

    Args:
        config: the options: which directory, and the server that has the activations.
        incomplete: why the run ended early, if it did.

    Returns:
        0; 1 if a sample failed or is missing, or activations that were to be stored are not known to be.

    Raises:
        EvalError: the directory holds no evaluation.
    """
    summary = conclude(config.results_dir, incomplete, config)
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
