"""What a real server stored reaches a sample's record and the results directory."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from deployments.activations import read_run
from evals.results.results import read_json
from evals.results.transfer import transfer
from evals.server.client import ChatClient
from evals.server.inline import sampled_values

POINTS = ["layers.*.output", "lm_head.output"]


async def ask(base_url: str, session: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two answers' `activations_meta`, and sampled values of them."""
    client = ChatClient(base_url, timeout=60, retries=2, parallel=2)
    body = {"model": "vitrine-demo", "max_tokens": 8, "temperature": 0, "session_id": session}
    body |= {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "capture": {"points": POINTS}}
    try:
        metas = [(await client.chat(body))["activations_meta"] for _ in range(2)]
        return metas, await sampled_values(client, metas, 20)
    finally:
        await client.close()


def test_stored_values_are_sampled_and_transferred(served: Any, tmp_path: Path) -> None:
    metas, sampled = asyncio.run(ask(served.base_url, "recorded"))
    runs = [run for meta in metas for run in meta["runs"]]
    found = transfer(tmp_path, served.base_url, "recorded")
    assert (found["runs"], found["path"]) == (2, "activations/recorded")
    assert read_json(tmp_path / "activations" / "transferred.json") == found
    assert list(sampled) == [run["run_id"] for run in runs]
    for run in runs:
        stored = read_run(tmp_path / found["path"], run["run_id"])
        assert list(stored) == list(run["points"])
        for name, at in sampled[run["run_id"]].items():
            where = at["sample_info"]
            values = stored[name][where["positions"]][:, where["dimensions"]].float()
            assert torch.equal(torch.tensor(at["data"]), values)
            assert at["shape"] == run["points"][name]["shape"]
