"""LangChain's ChatOpenAI in its usual ways: prints JSON."""

import asyncio
import functools
import json
import operator

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "Ann has 3 boxes of 12 pens. How many pens is that?"


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    return {"3*12": "36"}.get(expression, "error")


class Sum(BaseModel):
    """A number of things."""

    total: int = Field(ge=0, le=999)


def model(**fields) -> ChatOpenAI:
    return ChatOpenAI(model="vitrine-demo", temperature=0, max_tokens=64, max_retries=0, **fields)


def plain() -> dict:
    llm = model()
    whole = llm.invoke([("system", "You are a helpful assistant."), ("human", QUESTION)])
    chunks = list(model(stream_usage=True).stream([("system", "You are a helpful assistant."), ("human", QUESTION)]))
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    scored = llm.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    return {
        "whole": [whole.content, whole.usage_metadata, whole.response_metadata["finish_reason"]],
        "streamed": [gathered.content, gathered.usage_metadata, gathered.response_metadata["finish_reason"]],
        "together": [answer.content for answer in asyncio.run(llm.abatch([QUESTION] * 4))],
        "alone": llm.invoke(QUESTION).content,
        "scored": len(scored.response_metadata["logprobs"]["content"]) == scored.usage_metadata["output_tokens"],
    }


def tools() -> dict:
    llm = model().bind_tools([calculator])
    messages: list = [HumanMessage(QUESTION)]
    calls = []
    while not calls or messages[-1].type == "tool":
        answer = llm.invoke(messages)
        messages.append(answer)
        calls += answer.tool_calls
        messages += [
            ToolMessage(calculator.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
        ]
        assert len(messages) < 16
    first, *others = llm.stream(QUESTION)
    streamed = functools.reduce(operator.add, others, first).tool_calls
    return {
        "calls": [[call["name"], call["args"]] for call in calls],
        "streamed": [[call["name"], call["args"]] for call in streamed],
        "answer": messages[-1].content,
    }


def structured() -> dict:
    return {
        method: model().with_structured_output(Sum, method=method).invoke(QUESTION).total
        for method in ("json_schema", "function_calling")
    }


print(json.dumps({part.__name__: part() for part in (plain, tools, structured)}))
