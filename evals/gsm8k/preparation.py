"""What an evaluation asks, chosen and checked before the first sample."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from deployments.demo_model.calculator import TOOL
from evals.config import Config, EvalError
from evals.results.provenance import Facts, facts, sampled_as_the_model
from evals.server.server_queries import first_model, refused
from evals.task import steering
from evals.task.problems import load_few_shot, load_problems, locate
from evals.task.prompts import Prompts
from evals.task.rewards import Reward, load_rewards
from evals.task.trajectory import Sample, scored


class EvaluationInputs(NamedTuple):
    """What is asked, all that the answers depend on."""

    config: Config  # with the model's name
    problems: pa.Table
    prompts: Prompts
    reward: Reward
    record: Facts

    def score(self, sample: Sample) -> Sample:
        """A sample scored and rewarded as this evaluation does; as it is where it failed."""
        return sample if sample.outcome == "failed" else self.reward(scored(sample, self.config.rule))


def prepare(config: Config, say: Callable[[str], None]) -> EvaluationInputs:
    """Chooses what is asked.

    Args:
        config: the options.
        say: called with what the user should know.

    Raises:
        EvalError: there are no such problems, texts or rewards, or the server refuses an option.
        RequestFailed: no server answers.
    """
    reward = load_rewards(config.rewards)
    locate(config.dataset)  # before the server is asked
    config = sampled_as_the_model(config.model_copy(update={"model": config.model or first_model(config.base_url)}))
    problems = load_problems(config)
    few_shot = load_few_shot(config, set(problems["id"].to_pylist()))
    prompts = Prompts(config.variants, few_shot, config.system)
    if config.epochs > 1 and not config.temperature:
        say(f"--epochs {config.epochs}: at temperature 0 the answers to a problem are the same")
    record = facts(config, prompts, locate(config.dataset), problems.num_rows)
    check(config, record, prompts.messages(problems["question"][0].as_py(), next(iter(config.variants))))
    return EvaluationInputs(config, problems, prompts, reward, record)


def check(config: Config, record: Facts, messages: list[dict[str, Any]]) -> None:
    """Returns if no option is one that the server refuses whatever the question.

    Args:
        config: the options, with the model's name.
        record: of `provenance.facts`.
        messages: those of the first problem.

    Raises:
        EvalError: One is; the text names it and says what to do.
    """
    names, context = steering.asked(config), record["model"].get("max_model_len")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise EvalError(
            f"--sweep: two conditions would be named {repeated[0]}: rename the variant, or round the scales"
        )
    if isinstance(context, int) and config.max_tokens >= context:
        raise EvalError(f"--max-tokens {config.max_tokens}: the model's context is {context} tokens with the question")
    if record["server"]["versions"]:  # of another server each request may cost
        _check_tools(config)
        _check_interventions(config, messages)


def _check_tools(config: Config) -> None:
    """Refuse tools that the model's template does not know."""
    if "with-tools" in config.modes:
        refusal = _refusal(config, [{"role": "user", "content": "1 + 1?"}], {"tools": [TOOL]})
        if refusal.get("param") == "tools":
            raise EvalError(f"{config.model}: {refusal.get('message')}: choose --mode no-tools")


def _check_interventions(config: Config, messages: list[dict[str, Any]]) -> None:
    """Refuse interventions that do not fit the model, or name a tensor that the server does not have, by layer.

    Which tokens they change is not checked: that depends on the question, its variant and the answer's length.
    """
    for cell in {cell.layer: cell for cell in steering.cells(config)}.values():
        _, interventions = steering.find(config, cell.name)
        refusal = _refusal(config, messages, {"interventions": interventions})
        param = str(refusal.get("param"))
        if param.startswith("interventions") and ".tokens" not in param:
            where = "" if cell.layer is None else f" at layer {cell.layer}"
            raise EvalError(f"--interventions{where}: {param}: {refusal.get('message')}")


def _refusal(config: Config, messages: list[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": config.model, "messages": messages, "max_tokens": 1, "store_activations": False}
    return refused(f"{config.base_url}/chat/completions", body | fields)
