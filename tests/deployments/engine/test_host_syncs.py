"""The host waits for the device once where it reads what a step chose, and nowhere before."""

import pytest
import torch

from deployments.engine.decoding.sampling import launch
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.engine import Engine
from deployments.engine.request import GREEDY, LensLayers, Request, Sampling
from tests.deployments.conftest import DEVICE
from tests.deployments.engine.host_syncs import HostSyncs

MIXED = [
    GREEDY,
    Sampling(0.8, seed=1),
    Sampling(1.0, 0.9, seed=2),
    Sampling(1.2, 0.9, 40, seed=3, min_p=0.01),
    Sampling(0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    Sampling(1.0, logit_bias={3: 4.0, 7: -100.0}, min_tokens=4, seed=4),
]


@pytest.mark.parametrize("guided", [False, True])
def test_choosing_a_mixed_batch_waits_once(guided, demo):
    compiler = pytest.importorskip("deployments.engine.decoding.guided").GrammarCompiler(demo) if guided else None
    grammar = compiler and compiler.compile("start: /[a-z]{5}/", "response_format")
    requests = [Request("", [1, 2, 3], 9, one, stop_token_ids=(5,), logprobs=2) for one in MIXED]
    requests += [Request("", [1], 9, Sampling(min_tokens=2), grammar=grammar), Request("", [1], 9)]
    vocabulary = demo.hf.get_output_embeddings().out_features
    states = [*(SamplingState(request, demo.eos, vocabulary) for request in requests), None]
    logits = 5 * torch.randn(len(states), vocabulary, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with HostSyncs() as syncs:
        choice = launch(logits, states)
        assert syncs.seen == []
        chosen = choice.read()
        assert len(syncs.seen) == 1, syncs.seen
    assert not chosen.failed
    assert len(chosen.logprobs) == len(MIXED)


def test_the_lens_and_each_prompts_logprobs_wait_once_a_step(tiny, prompt):
    model = tiny("qwen3")
    outputs = [model.points.named(f"layers.{layer}.output", "")[0] for layer in range(3)]
    fixed = LensLayers((0, 1), tuple(outputs[:2]), 3, targets=(4, 5))
    lenses = [fixed, fixed._replace(targets=(), last=outputs[2])]
    engine = Engine(model, fixed_memory=False)
    for i, lens in enumerate(lenses):
        engine.submit(Request(str(i), prompt(90 + i), 9, lens=lens, prompt_logprobs=i, ignore_eos=True))
    counts = []
    for _ in range(2):
        with HostSyncs() as syncs:
            engine.step()
        counts.append(len([sync for sync in syncs.seen if "/decoding/" in sync]))
    assert counts == [4, 2]  # two prompts, the lens, the tokens; then the lens, the tokens
