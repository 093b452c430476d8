"""inspect_ai's tasks over the provider `vitrine/MODEL`: its own kinds of scoring and a tool loop, with capture."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed: make lint"),
    pytest.mark.usefixtures("cluster"),  # in one process with those that need it: importing inspect_ai takes seconds
]


@pytest.fixture(scope="module")
def read(logs):
    from inspect_ai.log import read_eval_log

    by_name = {name: read_eval_log(str(path)) for name, path in logs.items()}
    assert {name: log.status for name, log in by_name.items()} == dict.fromkeys(("loop", "choices", "sums"), "success")
    return by_name


def calls(sample):
    return [event.output for event in sample.events if event.event == "model"]


def test_each_call_of_a_tool_loop_names_its_stored_run(client, read):
    log = read["loop"]
    (session,) = {call.metadata["session_id"] for sample in log.samples for call in calls(sample)}
    assert session == f"inspect-{log.eval.task_id}"
    stored = client.get(f"/activations/session/{session}", cast_to=object)["runs"]
    tags = {run["run_id"]: run["tags"] for run in stored}
    assert len(tags) == sum(len(calls(sample)) for sample in log.samples)
    for sample in log.samples:
        assert len(calls(sample)) > 1
        messages = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
        for call, message in zip(calls(sample), messages, strict=True):
            (run_id,) = call.metadata["run_ids"]
            assert call.metadata["status"] == "stored"
            assert call.metadata["activations_meta"]["runs"][0]["points"].keys() == {"layers.2.output"}
            told = {"task": "loop", "sample": "pens", "epoch": str(sample.epoch), "message": str(message)}
            assert tags[run_id] == told


def test_multiple_choice_and_a_score_without_a_model_are_recorded_too(read):
    for name in ("choices", "sums"):
        assert {sample.output.metadata["status"] for sample in read[name].samples} == {"stored"}
        assert all(sample.scores for sample in read[name].samples)


def test_without_capture_an_output_has_no_metadata(unrecorded):
    from inspect_ai.log import read_eval_log

    log = read_eval_log(str(unrecorded))
    assert log.status == "success"
    assert log.samples[0].output.metadata is None


def test_capture_in_a_stream_is_refused():
    from vitrine.inspect.model import VitrineAPI

    with pytest.raises(ValueError, match="stream: not with capture or readouts"):
        VitrineAPI("some/model", capture=True, stream=True)


def test_fields_are_sent_only_when_given():
    from vitrine.inspect.model import VitrineAPI

    plain = VitrineAPI("some/model")
    assert plain._fields | plain._recorded(3) == {}
    asked = VitrineAPI("some/model", readouts="truth", preset="calm", session_id="mine")
    expected = {"readouts": ["truth"], "preset": "calm", "session_id": "mine"}
    assert asked._fields | asked._recorded(3) == expected


def test_readouts_of_each_choice_come_into_the_metadata():
    from vitrine.inspect.model import results

    values = {"truth": {"generated": {"first": 0, "values": [[0.3]]}}}
    answer = {"choices": [{"index": 1, "readouts": values}, {"index": 0, "readouts": None}]}
    assert results(answer) == {"readouts": [None, values]}


def test_the_provider_needs_no_torch_and_no_ray(interpreter, unrecorded, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nprint('vitrine.inspect.model' in sys.modules, {'torch', 'ray'} & sys.modules.keys())"
    )
    assert interpreter.run(program).stdout == "True set()\n"
