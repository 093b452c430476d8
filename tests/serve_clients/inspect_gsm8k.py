"""inspect_ai solves 20 problems with a calculator over its OpenAI-compatible provider, and prints the results."""

import json
import os
import sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from deployments.demo_model import INSTRUCTION  # noqa: E402
from deployments.demo_model.calculator import CalculatorError, calculate  # noqa: E402

PROBLEMS = [json.loads(line) for line in (ROOT / "deployments/demo_model/demo.jsonl").read_text().splitlines()[:20]]


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Evaluates an arithmetic expression with + - * / and parentheses.

        Args:
            expression: for example (3 + 4) * 2.5
        """
        try:
            return calculate(expression)
        except CalculatorError as error:
            return f"error: {error}"

    return execute


def main(log_dir: str) -> None:
    problems = [Sample(one["question"] + INSTRUCTION, target=one["answer"].split("#### ")[1]) for one in PROBLEMS]
    overlong = Sample("Tom has a very long story. " * 2000, target="0")
    model = get_model(
        "openai-api/vitrine/vitrine-demo", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    config = GenerateConfig(temperature=0, max_tokens=512, max_connections=8, max_retries=1)
    task = Task(dataset=[*problems, overlong], solver=[use_tools(calculator()), generate()], scorer=match(numeric=True))
    (log,) = eval(task, model=model, log_dir=log_dir, display="none", **config.model_dump(exclude_none=True))
    said = [
        {
            "question": str(sample.input).removesuffix(INSTRUCTION),
            "answer": sample.output.completion,
            "correct": sample.scores["match"].value == "C",
            "stop_reason": sample.output.stop_reason,
            "calls": sum(len(message.tool_calls or ()) for message in sample.messages if message.role == "assistant"),
            # inspect_ai counts what the server had in its cache apart from the other input tokens.
            "tokens": [
                sample.output.usage.input_tokens + (sample.output.usage.input_tokens_cache_read or 0),
                sample.output.usage.output_tokens,
            ],
        }
        if sample.output.usage
        else {"stop_reason": sample.output.stop_reason}
        for sample in log.samples or ()
    ]
    print(json.dumps({"status": log.status, "error": log.error and log.error.message, "samples": said}))


main(sys.argv[1])
