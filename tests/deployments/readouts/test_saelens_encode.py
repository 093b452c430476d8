"""Features equal those of SAELens' own `encode`, where SAELENS_PYTHON names a Python that has sae-lens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from deployments.readouts.files import define, read_saelens
from deployments.readouts.values import Readout

PYTHON = os.environ.get("SAELENS_PYTHON")
ENCODE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from sae_lens import GatedSAE, GatedSAEConfig, JumpReLUSAE, JumpReLUSAEConfig, StandardSAE, StandardSAEConfig
from sae_lens import TopKSAE, TopKSAEConfig
KINDS = {"standard": (StandardSAE, StandardSAEConfig), "gated": (GatedSAE, GatedSAEConfig),
         "topk": (TopKSAE, TopKSAEConfig), "jumprelu": (JumpReLUSAE, JumpReLUSAEConfig)}
torch.manual_seed(0)
for where in map(Path, sys.argv[1:]):
    asked = json.loads((where / "asked.json").read_text())
    sae, config = KINDS[asked.pop("architecture")]
    made = sae(config(d_in=24, d_sae=64, **asked))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            torch.nn.init.normal_(parameter, std=0.3)
            if name == "threshold":
                parameter.abs_()
        made.cfg.metadata.hook_name, made.cfg.metadata.model_name = "blocks.1.hook_resid_post", "demo"
        made.save_inference_model(where) if hasattr(made, "save_inference_model") else made.save_model(where)
        rows = torch.randn(9, 24) * 2
        features = made.encode(rows)
        features = features.to_dense() if features.is_sparse else features
        one = torch.zeros_like(features)
        one[:, 11] = 3.0
        made.encode(rows)
        save_file({"rows": rows, "features": features.contiguous()}, where / "rows.safetensors")
"""
CASES = [
    {"architecture": architecture, "apply_b_dec_to_input": taken, "normalize_activations": normalization, **more}
    for architecture, more in (
        ("standard", {}),
        ("gated", {}),
        ("topk", {"k": 5}),
        ("topk", {"k": 5, "rescale_acts_by_decoder_norm": True}),
        ("jumprelu", {}),
    )
    for taken in (True, False)
    for normalization in ("none", "layer_norm", "constant_norm_rescale")
]


@pytest.mark.skipif(not PYTHON, reason="SAELENS_PYTHON names no Python that has sae-lens")
def test_features_equal_saelens_own(tmp_path: Path) -> None:
    import json

    places = []
    for number, case in enumerate(CASES):
        places.append(tmp_path / str(number))
        places[-1].mkdir()
        (places[-1] / "asked.json").write_text(json.dumps(case))
    assert PYTHON
    done = subprocess.run([PYTHON, "-c", ENCODE, *map(str, places)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for place, case in zip(places, CASES, strict=True):
        spec, tensors = read_saelens(place)
        readout = Readout(define(save(tensors), spec | {"name": "sae"}), torch.device("cpu"))
        recorded = load_file(place / "rows.safetensors")
        got = readout.encode(recorded["rows"])
        torch.testing.assert_close(
            got, recorded["features"], rtol=1e-5, atol=1e-5, msg=lambda m, case=case: f"{case}: {m}"
        )
        assert (got > 0).any(), case
