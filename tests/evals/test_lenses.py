"""Lenses fitted to a tiny model: the Jacobian is autograd's, a resumed fit is the same, the tuned lens is better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import evals.lenses
from deployments.demo_model import WEIGHTS
from evals.lenses import main

SKIP, TEXTS = 2, ("Ann has 3 boxes of 12 pens.", "Tom had 5 apples and ate 2 of them.", "It is 7 km to the town.")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model of three layers of 16 entries."""
    tokenizer, path = AutoTokenizer.from_pretrained(WEIGHTS), tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def fit(model: Path, kind: str, out: Path, texts=TEXTS, code=0, **options) -> tuple[dict[str, torch.Tensor], dict]:
    """The maps and the card; empty if the command ends with another code."""
    data = out.with_suffix(".txt")
    data.write_text("\n".join(texts))
    given = {"kind": kind, "data": data, "out": out, "skip-first": SKIP, "dtype": "float32"} | options
    assert main(["fit", str(model), *(f"--{name}={value}" for name, value in given.items())]) == code
    if code:
        return {}, {}
    with safe_open(out / "lens.safetensors", "pt") as file:
        return load_file(out / "lens.safetensors"), json.loads(file.metadata()["spec"])["card"]


def by_autograd(path: Path, layer: int, text: str) -> torch.Tensor:
    """The text's Jacobian as docs/lens.md defines it, [hidden, hidden]."""
    model, ids = LlamaForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)(text)["input_ids"]
    kept: dict[str, torch.Tensor] = {}
    for name, at in (("source", layer), ("final", -1)):
        model.model.layers[at].register_forward_hook(lambda *of, name=name: kept.update({name: of[-1]}))
    model(torch.tensor([ids]))

    def row(u: int, i: int) -> torch.Tensor:
        return torch.autograd.grad(kept["final"][0, u, i], kept["source"], retain_graph=True)[0][0]  # [t, j]

    counted = range(SKIP, len(ids) - 1)
    return torch.stack([sum(row(u, i) for u in counted)[SKIP:-1].mean(0) for i in range(16)])


def test_the_jacobian_is_autograds(model, tmp_path):
    found, card = fit(model, "jacobian", tmp_path / "out", chunk=5)
    assert sorted(found) == ["layers.0.weight", "layers.1.weight"]
    assert card["sequences"] == 3
    assert card["held_out"] is None, "fewer than ten texts"
    for layer in (0, 1):
        want = torch.stack([by_autograd(model, layer, text) for text in TEXTS]).mean(0)
        torch.testing.assert_close(found[f"layers.{layer}.weight"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "learner"), [("jacobian", "Jacobian"), ("tuned", "Tuned")])
def test_a_fit_that_was_stopped_continues_to_the_same_lens(model, tmp_path, monkeypatch, kind, learner):
    whole, _ = fit(model, kind, tmp_path / "whole", batch=1)
    monkeypatch.setattr(evals.lenses, "SAVE_EVERY", 1)
    add, added = getattr(evals.lenses, learner).add, []

    def stop(self, batch):
        if len(added) == 1:
            added.append("stopped")
            raise OSError("stopped")
        add(self, batch)
        added.append(batch)

    monkeypatch.setattr(getattr(evals.lenses, learner), "add", stop)
    fit(model, kind, tmp_path / "parts", batch=1, code=2)
    fit(model, kind, tmp_path / "parts", batch=1, length=64, code=2)  # of another fit
    again, _ = fit(model, kind, tmp_path / "parts", batch=1)
    assert len(added) == 4
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_tuned_lens_is_nearer_to_the_final_distribution(model, tmp_path):
    _, card = fit(model, "tuned", tmp_path / "out", TEXTS * 7, batch=1, epochs=4, rate=0.02)
    held = card["held_out"]
    assert held["sequences"] == 2
    assert all(fitted < 0.8 * plain for plain, fitted in zip(held["plain"][:-1], held["fitted"], strict=False))
    assert held["plain"][-1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("line", ['{"answer": 3}', "[1]", "no JSON"])
def test_a_file_without_texts_is_refused(model, tmp_path, capsys, line):
    data = tmp_path / "data.jsonl"
    data.write_text(f"\n{line}\n")
    assert main(["fit", str(model), "--kind=tuned", f"--data={data}", f"--out={tmp_path}"]) == 2
    assert "line 2" in capsys.readouterr().err
