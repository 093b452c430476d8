"""Each Python block of the pages runs, and each command runs or has names, options and files that exist."""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from safetensors.torch import save_file
from torch import ones

from deployments.collect import collect
from deployments.options import Options
from tests.conftest import ROOT, Served

ADDRESS = "http://127.0.0.1:8000"
PAGES = {
    str(path.relative_to(ROOT).with_suffix("")): path.read_text()
    for path in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
}
# Whose blocks another test runs.
ELSEWHERE = {
    "docs/data": "tests/evals/test_data_page.py",
    "docs/nnsight": "tests/serve_app/routes/test_nnsight.py",
    "docs/quickstart": "tests/serve_clients/test_page.py",
    "docs/tutorial": "tests/examples/test_tutorial.py",
}
# Whose blocks run here, in their order: all, or those in Python and the commands of some sections.
HERE: dict[str, list[str]] = {
    "README": [""],
    "docs/capture": ["Collect a list"],
    "docs/deploy": ["Pin or delete a session"],
    "docs/internals": [],
    "docs/evaluation": ["Steer the model"],
    "docs/http": [],
    "docs/interventions": [],
    "docs/lens": [],
    "docs/readouts": [],
}
# Beginnings of blocks and commands that are neither run nor checked.
EXCEPTIONS = {
    f"curl -s {ADDRESS}/models/": "loads a model of the hub",
    "git clone ": "a reader has the address",
    "ray ": "starts a cluster, or runs on one: tests/evals/gsm8k/test_ray_job.py",
    "aws ": "the cloud's own tool",
    "kubectl ": "needs Kubernetes; tests/test_cluster_files.py checks its file",
    "redis-server ": "a part of the command by which tests/chaos starts the head",
    "lm_eval ": "needs the hub's problems; tests/serve_clients/test_lm_eval.py runs it with others",
    "inspect ": "needs the hub's problems; tests/vitrine/inspect runs others",
}
# Of these nothing but their files is checked.
SHELL = {"source", "export", "cd", "openssl", "mkdir", "umask", "echo", "serve", "jupyter"}
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
# The shipped model has 6 layers, and few rows take seconds.
SMALL = {"smollm2": "vitrine-demo", "layers.12.": "layers.3.", "head -n 40": "head -n 2", "tail -n 60": "tail -n 4"}
COUNTRIES = '["France", "Germany", "Italy", "Spain", "Japan", "Russia", "Greece", "Austria", "Ireland", "Egypt"]'
CITIES = '[" Paris", " Berlin", " Rome", " Madrid", " Tokyo", " Moscow", " Athens", " Vienna", " Dublin", " Cairo"]'
STATEMENT = '[{"text": "A dog is a mammal.", "label": True, "group": "dog"}]'


class Block(NamedTuple):
    page: str
    section: str
    before: str  # of the page
    language: str
    code: str

    @property
    def runs_here(self) -> bool:
        python, sections = self.language == "python", HERE.get(self.page)
        return sections is not None and (python or not sections or self.section in sections)


def blocks(page: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(sh|python|py|console)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE):
        before = PAGES[page][: found.start()]
        yield Block(page, re.findall(r"^##+ (.*?)(?: \{#.*)?$|\A", before, re.MULTILINE)[-1], before, *found.groups())


def commands(block: Block) -> list[str]:
    """One in quotes may span lines."""
    return re.findall(r"^\S(?:[^'\n]|'[^']*')*$", block.code.replace("\\\n", ""), re.MULTILINE)


BLOCKS = [block for page in PAGES for block in blocks(page)]
TO_CHECK = [block for block in BLOCKS if block.language == "sh" and not (block.runs_here or block.page in ELSEWHERE)]


def test_every_block_is_run_or_checked_or_excepted() -> None:
    for page, file in ELSEWHERE.items():
        assert re.search(rf"\b{page.removeprefix('docs/')}\b", (ROOT / file).read_text()), f"{file} names no {page}"
    for block in BLOCKS:
        if block.language != "sh" and not block.runs_here and not block.code.startswith(tuple(EXCEPTIONS)):
            assert block.page in ELSEWHERE, block
    known = [block.code for block in BLOCKS] + [command for block in BLOCKS for command in commands(block)]
    assert not [start for start in EXCEPTIONS if not any(code.startswith(start) for code in known)]


class Accepted(Exception):
    """The options are ones of the command."""


def main_of(module: str) -> Callable[[list[str]], Any]:
    if module.endswith(".py"):
        return runpy.run_path(str(ROOT / module))["main"]
    found = importlib.import_module(module)
    return (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main


@pytest.mark.parametrize("block", TO_CHECK, ids=lambda block: f"{block.page}, {block.section}")
def test_a_command_has_names_options_and_files_that_exist(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise Accepted

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", accept)
    for command in commands(block):
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for joins, simple in itertools.groupby(lexer, lambda word: set(word) <= set(";&|()")):
            words = [word for word in simple if not re.match(r"[A-Z_]+=", word)]
            if not joins and not " ".join(words).startswith(tuple(EXCEPTIONS)):
                check(words, block)


def check(words: list[str], block: Block) -> None:
    match words:
        case ["python", "-m", "pytest", *_]:
            pass
        case ["python", "-c", code]:
            exec(code, {})  # noqa: S102 - the project's own page
        case ["python", "-m", module, *options] | ["python", module, *options]:
            with pytest.raises(Accepted):
                main_of(module)(options)
        case ["serve", "run", "serve_app:app" | "serve_app:build_app", *options]:
            Options.model_validate(dict(option.split("=", 1) for option in options))
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["pip", "install", *wanted]:
            assert not [one for one in wanted if one.startswith("vitrine")], "of another project"
            assert set(re.findall(r"\.\[(\w+)\]", " ".join(wanted))) <= EXTRAS
        case [program, *_]:
            assert program in SHELL, f"say how to check it, or why not: {words}"
    for word in words:
        if re.search(r"\.(py|jsonl|yaml|json|csv|safetensors|parquet|txt)$", word) and not re.search(r"[*$]", word):
            assert (ROOT / word).exists() or word in block.before, f"nothing makes {word}"


@pytest.fixture
def sessions(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the pages' examples begin with: two stored sessions, and a directory with the files that they read."""
    for name in ("deployments", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRINE_ACTIVATIONS", str(tmp_path / "pulled"))
    statements = (ROOT / "examples" / "statements" / "statements.jsonl").read_text().splitlines(keepends=True)
    Path("statements.jsonl").write_text("".join(statements[:80]))
    collect("statements.jsonl", base_url=served.base_url, session="statements", points=["layers.*.output"])
    save_file({"formal": ones(192)}, "formal.safetensors")
    fields = {"model": "vitrine-demo", "session_id": "first-steps", "capture": {"points": ["layers.1.output"]}}
    httpx.post(f"{served.base_url}/completions", json=fields | {"prompt": "Ann has"}, timeout=60).raise_for_status()
    yield
    made = [f"activations/session/{name}" for name in ("statements", "first-steps")]
    for path in [*made, "lenses/tuned", *(f"readouts/{name}" for name in ("truth", "sae-12", "formal"))]:
        httpx.delete(f"{served.base_url}/{path}", timeout=60)


@pytest.mark.parametrize("page", HERE)
def test_the_examples_of_a_page_work_in_their_order(page: str, served: Served, sessions: None) -> None:
    changed = {STATEMENT: '"statements.jsonl"', 'model="smollm2",\n    ses': f'base_url="{served.base_url}",\n    ses'}
    changed |= {COUNTRIES: '["3", "4"]', CITIES: '[" pens", " boxes"]'}
    changed |= SMALL | {"http://gpu-box:8000": ADDRESS, "~/.vitrine/activations": "pulled"}
    more = {
        "evals.gsm8k": [f"--base-url={served.base_url}", "--max-tokens=8"],
        "evals.probes": ["--permutations=1", "--points=layers.3.output"],
        "evals.lenses": ["--max-tokens=400", "--held-out-tokens=100"],
        "deployments.readouts": [f"--url={served.root}"],
    }
    names: dict[str, Any] = {}
    for block in filter(lambda block: block.runs_here, blocks(page)):
        for old, new in (changed | {ADDRESS: served.root}).items():
            block = block._replace(code=block.code.replace(old, new))
        if block.language == "python":
            exec(block.code, names)  # noqa: S102 - the project's own page
        for command in commands(block) if block.language == "sh" else ():
            match shlex.split(command):
                case ["python", "-m", module, *options] | ["python", module, *options]:
                    assert not main_of(module)([*options, *more.get(module, [])]) or module.endswith(".py"), command
                case ["pip", *_] as words:
                    check(words, block)
                case _:
                    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=60)
                    assert done.returncode == 0, done.stderr
                    assert '"error"' not in done.stdout, done.stdout
    for name in names.keys() & {"client", "server"}:
        names[name].close()
