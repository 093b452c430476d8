"""What the server would refuse of every sample, found before the first one."""

from typing import Any

from deployments.demo_model.calculator import TOOL
from deployments.points.capture import MOST_INLINE_VALUES
from evals.config import Config, EvalError
from evals.results.provenance import Facts
from evals.server.server_queries import refused
from evals.task import steering


def check(config: Config, record: Facts, messages: list[dict[str, Any]]) -> None:
    """Returns if no option of the run is one that the server refuses whatever the question.

    Args:
        config: the options, with the model's name.
        record: of `provenance.facts`.
        messages: those of the first problem.

    Raises:
        EvalError: One is; the text names it and says what to do.
    """
    _check_names(config)
    _check_room(config, record)
    _check_readouts(config, record)
    if record["server"].get("versions"):  # of another server each request may cost
        _check_tools(config)
        _check_interventions(config, messages)


def _check_names(config: Config) -> None:
    """Refuse a steered condition with the name of a variant, or of another one: their samples would be one."""
    names = steering.asked(config)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise EvalError(
            f"--sweep: two conditions would be named {repeated[0]}: rename the variant, or round the scales"
        )


def _check_room(config: Config, record: Facts) -> None:
    """Refuse a limit of new tokens that no question fits beside: each answer would count as truncated."""
    context = record["model"].get("max_model_len")
    if isinstance(context, int) and config.max_tokens >= context:
        raise EvalError(f"--max-tokens {config.max_tokens}: the model's context is {context} tokens with the question")


def _check_readouts(config: Config, record: Facts) -> None:
    """Refuse readouts whose values at all new tokens are more numbers than the server puts into an answer."""
    width = sum(one.get("values") or 1 for one in (record["readouts"] or {}).values())  # numbers of a token
    if (count := width * config.max_tokens) > MOST_INLINE_VALUES:
        lower = f", or lower --max-tokens to {MOST_INLINE_VALUES // width}" if width <= MOST_INLINE_VALUES else ""
        raise EvalError(
            f"--readouts: {width} values of each of --max-tokens {config.max_tokens} are {count} numbers, and an "
            f"answer may have {MOST_INLINE_VALUES}: name fewer readouts{lower}"
        )


def _check_tools(config: Config) -> None:
    """Refuse tools that the model's template does not know."""
    if "with-tools" not in config.modes or config.tools != "native":
        return
    refusal = _refusal(config, [{"role": "user", "content": "1 + 1?"}], {"tools": [TOOL]})
    if refusal.get("param") == "tools":
        hint = "--tools text offers the calculator in plain text; or choose --mode no-tools"
        raise EvalError(f"{config.model}: {refusal.get('message')}: {hint}")


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
