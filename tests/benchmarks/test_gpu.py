"""The GPU benchmark at a size for a CPU: it agrees with transformers and writes its results."""

from __future__ import annotations

import json

from benchmarks import gpu


def test_it_agrees_with_transformers_and_keeps_its_findings(tmp_path, capsys):
    path = tmp_path / "found.json"
    assert gpu.main(["--size=tiny", "--rows=1", "--rows=3", "--new-tokens=4", f"--json={path}"]) == 0
    found = json.loads(path.read_text())
    head, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    assert head == {name: value for name, value in found.items() if name != "sizes"}
    assert set(head) == {"device", "versions", "copy_bytes_per_second", "new_tokens"}
    assert set(head["versions"]) == {"torch", "transformers"}
    tiny = found["sizes"]["tiny"]
    assert tiny["dtype"] == "torch.float32"
    assert {name: check["ok"] for name, check in tiny["parity"].items()} == dict.fromkeys(
        ("greedy", "capture", "steering"), True
    )
    assert tiny["parity"]["greedy"]["same_tokens"] == tiny["parity"]["steering"]["same_tokens"] == 3
    assert tiny["parity"]["capture"]["worst_relative"] < 1e-4
    assert set(tiny["rows"]) == {"1", "3"}
    for ways in tiny["rows"].values():
        assert set(ways) == {"generate", "engine", "one layer", "all layers", "steered"}
        for numbers in ways.values():
            assert set(numbers) == {"tokens_per_second", "of_roofline", "of_generate", "peak_bytes"}
            assert min(numbers.values()) > 0
