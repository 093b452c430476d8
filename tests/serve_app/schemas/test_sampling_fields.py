"""Sampling fields of a request become settings of the engine, which a recorded run keeps."""

from __future__ import annotations

from deployments.activations import read_run
from deployments.engine.request import Sampling
from serve_app.schemas.generation import ChatRequest

MODEL = "vitrine-demo"
PROMPT = "Tom has 3 boxes of"


def test_fields_become_settings():
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    body |= {"presence_penalty": 0.3, "frequency_penalty": -0.4, "logit_bias": {"12": 1.5, "0": -100}, "min_tokens": 4}
    common = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    got = ChatRequest.model_validate(common | body).sampling
    assert got == Sampling(**(body | {"logit_bias": {12: 1.5, 0: -100.0}}))
    assert ChatRequest.model_validate(common | dict.fromkeys(body)).sampling == Sampling()
    assert ChatRequest.model_validate(common | {"top_k": -1}).sampling == Sampling()  # as vLLM says that there is none


def test_a_template_gets_no_empty_list_of_calls():
    told = {"role": "assistant", "content": "x"}
    body = {"model": MODEL, "messages": [told | {"tool_calls": []}]}
    assert [message.spoken for message in ChatRequest.model_validate(body).messages] == [told]


def test_a_run_remembers_how_its_tokens_were_drawn(client):
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=3,
        logit_bias={"40": 2},
        extra_body={"capture": {"points": ["norm.output"], "required": True}, "min_p": 0.25},
    )
    (run,) = answer.activations_meta["runs"]
    sampling = read_run(run["points"]["norm.output"]["uri"], run_id=run["run_id"]).facts.sampling
    assert sampling["logit_bias"] == {"40": 2.0}
    assert sampling["min_p"] == 0.25
