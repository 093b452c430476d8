"""Tool calls in the common formats: parsed from text, derived from chat templates, and forced."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import pytest
from tokenizers import AddedToken
from transformers.utils.chat_parsing.response_templates import load_response_template

from deployments.chat.grammar import MOST_BEFORE
from deployments.chat.reader import AnswerReader
from deployments.chat.template import ChatFormat, ResponseFormats
from deployments.engine.engine import Engine
from deployments.engine.request import Request, Sampling
from deployments.errors import RequestError
from deployments.job import Job
from deployments.messages import whole_calls
from deployments.model.model import Model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": {}}}
TOOLS = [WEATHER, CLOCK]
QUESTION = {"role": "user", "content": "What is it like in Rome?"}
ROME = {"city": "Rome", "days": 7}
CALLS = [("get_weather", ROME), ("get_time", {})]

# Abridged from the models' own.
CHATML = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- "\\n" + (tool | tojson) }}
{%- endfor %}{{- '\\n</tools>\\nReturn calls within <tool_call></tool_call> tags.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}THINKING{%- endif %}
"""
THINKING = """{%- if thinking is defined and thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
LLAMA = """
{{- bos_token }}{%- for message in messages %}{%- if not message.tool_calls %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and message.role == 'user' %}{{- tools | tojson }}{%- endif %}{{- message.content + '<|eot_id|>' }}
{%- else %}{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL_HEAD = """
{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}{%- elif message.tool_calls %}
"""
MISTRAL = """{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have length 9!') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' }}{%- endfor %}"""
MISTRAL_NAMED = """{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}"""
MISTRAL_TAIL = """{{- eos_token }}{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"""

WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 7}}'
TIME_CALL = '{"name": "get_time", "arguments": {}}'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 7}}'

# Format -> architecture, chat template, special tokens (the first ends a text), other added tokens, two calls' text.
FORMATS = {
    "qwen": (
        "qwen3",
        CHATML.replace("THINKING", THINKING),
        ["<|im_end|>", "<|im_start|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>",
    ),
    "hermes": (
        "llama",
        CHATML.replace("THINKING", ""),
        ["<|im_end|>", "<|im_start|>"],
        [],
        f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>",
    ),
    "llama": (
        "llama",
        LLAMA,
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
        [],
        f'{LLAMA_CALL}; {{"name": "get_time", "parameters": {{}}}}',
    ),
    "mistral": (
        "mistral",
        MISTRAL_HEAD + MISTRAL + MISTRAL_TAIL,
        ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        [],
        f"[TOOL_CALLS][{WEATHER_CALL}, {TIME_CALL}]",
    ),
    "mistral_named": (
        "mistral",
        MISTRAL_HEAD + MISTRAL_NAMED + MISTRAL_TAIL,
        ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        [],
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 7}[TOOL_CALLS]get_time[ARGS]{}',
    ),
}
PARALLEL = set(FORMATS) - {"llama"}


@pytest.fixture(scope="module")
def models(build, byte_tokenizer):
    """Each format's small random model, with a tokenizer that has the format's tokens."""
    made = {}
    for name, (architecture, template, special, added, _) in FORMATS.items():
        tokenizer = type(byte_tokenizer)(
            tokenizer_object=byte_tokenizer.backend_tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str()),
            eos_token=special[0],
            bos_token=special[1],
            additional_special_tokens=special[2:],
            chat_template=template.strip(),
        )
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
        eos = tokenizer.convert_tokens_to_ids(special[0])
        hf = build(architecture, vocab_size=288, eos_token_id=eos, max_position_embeddings=4096, num_hidden_layers=1)
        made[name] = Model(hf, tokenizer, name)
    return made


@pytest.fixture(params=FORMATS)
def model(request, models):
    return models[request.param]


@pytest.fixture
def chat(model):
    return ChatFormat(model.tokenizer, model.hf)


@pytest.fixture
def prompt(chat):
    return chat.render([QUESTION], TOOLS)


def of_format(models, name):
    """The model of a format, and its chat format."""
    return models[name], ChatFormat(models[name].tokenizer, models[name].hf)


def text_of(model):
    return FORMATS[model.name][4]


def read(reader, pieces):
    """(content, [(name, arguments)], thoughts) of an answer that comes in pieces."""
    written = [*map(reader.add, pieces), reader.close()]
    calls = whole_calls(part for one in written for part in one.tool_calls)
    content, thoughts = ("".join(parts) for parts in zip(*((p.content, p.reasoning) for p in written), strict=True))
    return content, [(call.name, json.loads(call.arguments)) for call in calls], thoughts


def asked(model, chat, guidance=None, **fields):
    """A job's prompt and grammar, without thoughts."""
    job = Job("job", messages=[QUESTION], tools=TOOLS, template_kwargs={"thinking": False}, **fields)
    prompt = chat.render(job.messages, job.tools, job.template_kwargs)
    return prompt, (guidance or ResponseFormats(chat, model)).grammar(job, prompt)


def generated(model, chat, requests):
    """What a random model says to each (prompt, grammar, sampling), all in one batch: why it ended, and its text."""
    sent = [
        Request(
            str(i),
            chat.tokenize(prompt).ids,
            500,
            sampling,
            grammar=grammar,
            markers=chat.markers(TOOLS),
            streamed=False,
        )
        for i, (prompt, grammar, sampling) in enumerate(requests)
    ]
    return [(finished.reason, finished.rest.text) for finished in Engine(model).generate(sent)]


def test_calls_are_read_whole_and_by_character(model, chat, prompt):
    assert read(chat.reader(prompt, TOOLS), [text_of(model)]) == ("", CALLS, "")
    assert read(chat.reader(prompt, TOOLS), text_of(model)) == ("", CALLS, "")


def test_content_before_a_call_is_content(model, chat, prompt):
    content, calls, _ = read(chat.reader(prompt, TOOLS), ["Let me see.", text_of(model)])
    assert (content.strip(), calls) == ("Let me see.", CALLS)


def test_an_answer_without_calls_is_content(model, chat, prompt):
    for answer in ("Sunny, {as ever}.", '{"name": "Rome"}', "[1, 2]"):
        assert read(chat.reader(prompt, TOOLS), answer) == (answer, [], "")


def test_without_parallel_calls_the_first_is_all(model, chat, prompt):
    content, calls, _ = read(chat.reader(prompt, TOOLS, parallel=False), text_of(model))
    assert (content.strip(), calls) == ("", CALLS[:1])
    parts, _ = told(chat.reader(prompt, TOOLS, parallel=False, streamed=True), text_of(model))
    assert {part.number for part in parts} == {0}


def test_without_tools_what_looks_like_a_call_is_content(model, chat):
    prompt = chat.render([QUESTION], None)
    if reader := chat.reader(prompt, None):
        assert read(reader, text_of(model)) == (text_of(model), [], "")


def test_a_required_call_is_made_and_its_arguments_obey_the_schema(model, chat):
    prompt, grammar = asked(model, chat, must_call=("get_weather", "get_time"), parallel_calls=False)
    settings = [Sampling(seed=seed, temperature=0.5 + seed / 2) for seed in range(3)]
    for reason, text in generated(model, chat, [(prompt, grammar, sampling) for sampling in settings]):
        assert reason == "stop", text
        content, calls, _ = read(chat.reader(prompt, TOOLS), text)
        assert len(content) <= MOST_BEFORE, "little is said before a call"
        ((name, arguments),) = calls
        schemas = {"get_weather": WEATHER["function"]["parameters"], "get_time": {"maxProperties": 0}}
        jsonschema.validate(arguments, schemas[name])


def test_a_named_function_is_the_one_that_is_called(model, chat):
    guidance = ResponseFormats(chat, model)
    names = ("get_weather", "get_time")
    jobs = [asked(model, chat, guidance, must_call=(name,), parallel_calls=False) for name in names]
    said = generated(model, chat, [(*job, Sampling(seed=5)) for job in jobs])
    for name, (prompt, _), (reason, text) in zip(names, jobs, said, strict=True):
        assert reason == "stop"
        assert [called for called, _ in read(chat.reader(prompt, TOOLS), text)[1]] == [name]
    assert '{"city": "' in said[0][1]
    assert '", "days": ' in said[0][1], "arguments are spaced as the template writes them"


def test_several_calls_may_be_made_where_the_template_writes_several(model, chat):
    prompt, grammar = asked(model, chat, must_call=("get_time",))
    said = generated(model, chat, [(prompt, grammar, Sampling(seed=seed, temperature=2.0)) for seed in range(4)])
    counts = {len(read(chat.reader(prompt, TOOLS), text)[1]) if reason == "stop" else 2 for reason, text in said}
    assert (max(counts) > 1) == (model.name in PARALLEL)
    assert min(counts) >= 1


def test_where_a_schema_is_asked_for_too_the_model_may_call_or_answer_by_it(model, chat):
    schema = {"enum": ["yes", "no"]}
    prompt, grammar = asked(model, chat, schema=schema)
    said = generated(model, chat, [(prompt, grammar, Sampling(seed=seed)) for seed in range(2)])
    for reason, text in said:
        content, calls, _ = read(chat.reader(prompt, TOOLS), text)
        assert reason == "length" or calls or json.loads(content) in schema["enum"]


# ---- where the template shows no format


@pytest.fixture(scope="module")
def plain(byte_tokenizer, build):
    """A model whose template shows only contents, and ends with the answer's anchor."""
    template = "{% for message in messages %}@{{ message.role }}:{{ message.content }}{% endfor %}[/INST]"
    tokenizer = type(byte_tokenizer)(
        tokenizer_object=byte_tokenizer.backend_tokenizer, eos_token="<end>", chat_template=template
    )
    return Model(build("llama", vocab_size=288, max_position_embeddings=4096, num_hidden_layers=1), tokenizer, "plain")


def test_without_a_format_tools_are_refused_with_the_remedy(plain):
    chat = ChatFormat(plain.tokenizer, plain.hf)
    ways = {"tool_choice": lambda: asked(plain, chat, must_call=("get_time",)), "tools": lambda: chat.reader("", TOOLS)}
    for field, ask in ways.items():
        with pytest.raises(RequestError, match='set tool_call_format to "hermes"') as refused:
            ask()
        assert refused.value.field == field


def test_hermes_form_describes_tools_and_calls_in_plain_messages(plain):
    called = [{"function": {"name": name, "arguments": json.dumps(given)}} for name, given in CALLS]
    talk = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": called},
        *({"role": "tool", "content": text, "tool_call_id": text} for text in ("sunny", "noon")),
    ]
    chat = ChatFormat(plain.tokenizer, plain.hf).calling("hermes")
    system, question, calls, results = chat.render(talk, TOOLS).removesuffix("[/INST]").split("@")[1:]
    assert system.startswith("system:Be brief.\n\n# Tools")
    assert "get_weather" in system
    assert question == f"user:{QUESTION['content']}"
    assert calls == f"assistant:{FORMATS['hermes'][4]}"
    assert results == "user:<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"


def test_hermes_form_needs_neither_a_system_message_nor_two_messages_of_the_user_in_a_row(plain, monkeypatch):
    strict = (
        "{% for message in messages %}{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}@{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr(plain.tokenizer, "chat_template", strict)
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    talk = [QUESTION, called, {"role": "tool", "content": "sunny"}, {"role": "user", "content": "And now?"}]
    chat = ChatFormat(plain.tokenizer, plain.hf).calling("hermes")
    question, _, result = chat.render(talk, TOOLS).split("@")[1:]
    assert question.startswith("# Tools")
    assert question.endswith(f"\n\n{QUESTION['content']}")
    assert result == "<tool_response>\nsunny\n</tool_response>\nAnd now?"


def test_hermes_form_is_read_and_can_be_required(plain):
    chat = ChatFormat(plain.tokenizer, plain.hf)
    hermes = chat.calling("hermes")
    assert read(hermes.reader(hermes.render([QUESTION], TOOLS), TOOLS), FORMATS["hermes"][4]) == ("", CALLS, "")
    must = {"must_call": ("get_weather",), "tool_call_format": "hermes"}
    prompt, grammar = asked(plain, hermes, ResponseFormats(chat, plain), **must)
    ((_, text),) = generated(plain, hermes, [(prompt, grammar, Sampling(seed=3))])
    name, arguments = read(hermes.reader(prompt, TOOLS), text)[1][0]
    assert name == "get_weather"
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])


# ---- calls while they are written

LONG = {"city": 'Rome {the} "eternal" \\ [city]; </tool_' * 8, "days": 7, "more": {"a": [1, {"b": "}"}, "\u4eac"]}}
SHORT_CUT = '{"city": "Rome", "da'


def told(reader, pieces):
    """All parts of calls of an answer that comes in pieces, and its content."""
    written = [*map(reader.add, pieces), reader.close()]
    return [part for one in written for part in one.tool_calls], "".join(one.content for one in written)


def cut(text, seed):
    """A text in pieces: of one character each, or of random lengths."""
    ends = sorted(random.Random(seed).sample(range(1, len(text)), 12)) if seed else range(1, len(text))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_a_streamed_call_says_its_name_first_and_its_arguments_as_they_come(model, chat, prompt, seed):
    answer = text_of(model).replace(json.dumps(ROME), json.dumps(LONG))
    pieces = cut(answer, seed)
    parts, content = told(chat.reader(prompt, TOOLS, streamed=True), pieces)
    assert content.strip() == ""
    assert [part.number for part in parts] == sorted(part.number for part in parts)
    for index, name in enumerate(["get_weather", "get_time"]):
        first, *others = [part for part in parts if part.number == index]
        assert (first.name, first.arguments, bool(first.id)) == (name, "", True)
        assert all(part.arguments and part.id is None and part.name is None for part in others)
    assert sum(part.number == 0 for part in parts) > 4
    whole, _ = told(chat.reader(prompt, TOOLS), pieces)
    for calls in (whole_calls(parts), whole_calls(whole)):
        told_of = [(call.name, call.arguments) for call in calls]
        assert told_of == [("get_weather", json.dumps(LONG)), ("get_time", "{}")]


def test_what_was_told_of_a_call_that_is_cut_off_stands(model, chat, prompt):
    answer = text_of(model).partition(json.dumps(ROME))[0] + SHORT_CUT
    reader = chat.reader(prompt, TOOLS, streamed=True)
    parts, content = told(reader, answer)
    (call,) = whole_calls(parts)
    assert (call.name, call.arguments, content, reader.called) == ("get_weather", SHORT_CUT, "", True)
    assert told(chat.reader(prompt, TOOLS), answer) == ([], answer)  # where nothing was told, it is content


def test_what_stands_behind_the_arguments_of_a_malformed_call_is_content(models):
    model, chat = of_format(models, "hermes")
    prompt = chat.render([QUESTION], TOOLS)
    answer = '<tool_call>{"name": "get_time", "arguments": {"x": 1}} oops </tool_call> Well. ' + text_of(model)
    parts, content = told(chat.reader(prompt, TOOLS, streamed=True), answer)
    assert [(call.number, call.name) for call in whole_calls(parts)] == [
        (0, "get_time"),
        (1, "get_weather"),
        (2, "get_time"),
    ]
    assert content.strip() == "} oops </tool_call> Well."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"mistral"}))  # there all calls are one list
def test_a_malformed_call_behind_another_is_content_from_its_beginning(models, name, streamed):
    model, chat = of_format(models, name)
    answer = text_of(model).rpartition("{}")[0] + "oops"
    parts, content = told(chat.reader(chat.render([QUESTION], TOOLS), TOOLS, streamed=streamed), answer)
    assert [call.name for call in whole_calls(parts)] == ["get_weather"]
    assert answer.endswith(content.strip())
    assert content.strip().startswith(("<tool_call>", "[TOOL_CALLS]", '{"name"'))


def test_a_call_whose_name_comes_last_is_told_whole(models):
    model, chat = of_format(models, "mistral")
    answer = f'[TOOL_CALLS][{WEATHER_CALL}, {{"arguments": {{"zone": "UTC"}}, "name": "get_time"}}, {TIME_CALL}]'
    want = [("get_weather", ROME), ("get_time", {"zone": "UTC"}), ("get_time", {})]
    for streamed in (False, True):
        reader = chat.reader(chat.render([QUESTION], TOOLS), TOOLS, streamed=streamed)
        assert read(reader, answer) == ("", want, "")


def test_arguments_that_have_no_types_get_those_of_the_tools_schema():
    template = {
        "start_anchor": "assistant:",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<function=(?P<name>\w+)>",
                "close": "</function>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    number = {"type": "integer"}
    definitions = {"number": number, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, number]}}
    schemas = [number, {"$ref": "#/$defs/number"}, {"allOf": [{"$ref": "#/$defs/loop"}]}]
    for schema, streamed in itertools.product(schemas, (False, True)):
        parameters = {"properties": {"days": schema}, "$defs": definitions}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        reader = AnswerReader(load_response_template(template), "", [tool], streamed=streamed)
        assert read(reader, "<function=f><days>7</days></function>") == ("", [("f", {"days": 7})], "")


# ---- thoughts


def test_thoughts_come_apart_from_content(models):
    model, chat = of_format(models, "qwen")
    prompt = chat.render([QUESTION], None)
    answer = "<think>\nIs it sunny? 1 < 2.\n\n</think>\n\nYes,\n it is.\n"
    for pieces in ([answer], answer, [answer[:9], answer[9:30], answer[30:]]):
        assert read(chat.reader(prompt, None), pieces) == ("Yes,\n it is.\n", [], "Is it sunny? 1 < 2.")


def test_thoughts_that_the_prompt_has_begun_are_thoughts(models):
    model, chat = of_format(models, "qwen")
    prompt = chat.render([QUESTION], None) + "<think>\n"
    assert read(chat.reader(prompt, None), "Hm.\n</think>\n\nYes.") == ("Yes.", [], "Hm.")
    assert read(chat.reader(prompt, None), "Hm, cut") == ("", [], "Hm, cut")


@pytest.mark.parametrize(
    ("begun", "answer", "told"),
    [
        ("<think>\nHm, it", " rains.</think>\n\nYes.", ("Yes.", [], " rains.")),
        ("<think>\nHm.\n</think>\n\n", "\nYes.", ("Yes.", [], "")),
        ("It is ", " sunny < hot.", (" sunny < hot.", [], "")),
        ("It is <", "b> hot", ("b> hot", [], "")),
        ("I look. <tool_ca", 'll>{"name": "get_time", "arguments": {}}</tool_call>', ("", CALLS[1:], "")),
        ('<tool_call>\n{"name": "get_', 'time", "arguments": {}}\n</tool_call>', ("", CALLS[1:], "")),
    ],
)
def test_an_answer_that_is_continued_has_only_what_is_new(models, begun, answer, told):
    _, chat = of_format(models, "qwen")
    prompt = chat.render([QUESTION, {"role": "assistant", "content": begun}], TOOLS, ending="message")
    assert prompt.endswith(begun)
    for pieces in ([answer], answer):
        for streamed in (False, True):
            assert read(chat.reader(prompt, TOOLS, streamed=streamed), pieces) == told


@pytest.mark.parametrize(("begun", "free"), [("", True), ("<think>\nHm", True), ("It is", False)])
def test_a_form_allows_thoughts_only_before_content(models, begun, free):
    _, chat = of_format(models, "qwen")
    job = Job("job", messages=[QUESTION, {"role": "assistant", "content": begun}], schema={"enum": ["yes"]})
    assert ("thought" in chat.grammar_source(job, chat.render(job.messages, None, ending="message"))) == free


def test_thoughts_and_calls_come_in_one_answer(models):
    model, chat = of_format(models, "qwen")
    prompt = chat.render([QUESTION], TOOLS)
    answer = f"<think>\nRome.\n</think>\n\nI look.\n{text_of(model)}"
    content, calls, thoughts = read(chat.reader(prompt, TOOLS), answer)
    assert (content.strip(), calls, thoughts) == ("I look.", CALLS, "Rome.")


@pytest.mark.parametrize("begun", [True, False, None])
def test_a_form_is_enforced_behind_the_thoughts(models, begun):
    model, chat = of_format(models, "qwen")
    told = {"thinking": False} if begun is False else {}
    job = Job("job", messages=[QUESTION], schema={"enum": ["yes", "no"]}, template_kwargs=told)
    prompt = chat.render(job.messages, None, told) + ("<think>\n" if begun else "")
    grammar = ResponseFormats(chat, model).grammar(job, prompt)
    opening, closing = model.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    bias = {closing: 3.0} if begun is not None else {opening: 100.0, closing: 3.0}
    thought = ""
    settings = [Sampling(seed=seed, logit_bias=bias) for seed in range(3)]
    for reason, text in generated(model, chat, [(prompt, grammar, sampling) for sampling in settings]):
        assert reason == "stop", text
        content, _, thoughts = read(chat.reader(prompt, None), text)
        assert json.loads(content) in ("yes", "no")
        thought += thoughts
    assert bool(thought) == (begun is not False)
