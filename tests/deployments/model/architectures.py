"""How each causal architecture of transformers is served, found with tiny random models of its default config.

`python -m tests.deployments.model.architectures` writes the table of docs/models.md.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.errors import RequestError
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.points.capture import Capture
from tests.deployments.conftest import CONTEXT, _byte_tokenizer
from vitrine.points import TRANSFORMER_LENS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = "| served | lacks | architectures |\n|---|---|---|\n"
LIMIT_S, LIMIT_BYTES = 90, 6 << 30
NAMES = ("hook_embed", *TRANSFORMER_LENS)
LAYERS = 3
# Field of a config -> its value; the first pattern that fits the whole name.
SIZES: dict[str, Any] = {
    r"vocab_size|vocab_size_per_layer_input": 256,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_target_positions": CONTEXT,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r"eos_token_id": 2,
    r"is_decoder": True,
    r"num_kv_shared_layers": 0,
    r"qk_head_dim": 16,
    r"rotary_dim": 8,
    r"initializer_range": 0.15,
    r"residual_multiplier": 0.22,  # by default, factors are 1
    r"(num_)?(hidden_|decoder_|encoder_)?layers?|n_layers?|num_(encoder|decoder|hidden)_layers": LAYERS,
    r"first_k_dense_replace|num_dense_layers|n_group|topk_group|n_shared_experts|num_nextn_predict_layers": 1,
    r".*(experts_per_tok|experts_per_token|top_?k|topk|top_k_experts)|moe_k": 2,
    r"(moe_)?(n|num)_(routed_|local_)?experts|moe_num_experts": 4,
    r".*(key_value|kv|kv_n)_heads": 2,
    r".*heads|n_head": 4,
    r".*head_dim": 8,
    r".*(lora_rank|_rank)": 16,
    r"hidden_size|d_model|n_embd|dim|word_embed_proj_dim|embedding_size|emb_dim|hidden_dim": 32,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|_mlp_dim|d_ff|n_inner|dim_ff)(_mlp)?": 48,
}

# Words of a message -> what the table says.
REASONS = {
    "state": "a recurrent or compressed state",
    "Error: ": "no cache of keys and values in transformers' usual form",
    "logits differ": "logits that depend on padding, on later tokens, or on a cache that it lacks",
    "decoder layers": "no list of decoder layers",
}


class Outcome(NamedTuple):
    """How an architecture is served.

    Attributes:
        served: "together", "one at a time", or "refused: " or "not tried: " and the reason.
        lacks: The names of `NAMES` that some or all layers lack.
    """

    served: str
    lacks: str = ""


def _small(config: Any) -> dict[str, Any]:
    """The arguments for a config like this one with small sizes, and few layers of each kind."""
    given = config.to_dict()
    depth = getattr(config, "num_hidden_layers", None)
    kinds = list(dict.fromkeys(given.get("layer_types") or [])) or [None]
    layers = max(LAYERS, len(kinds))
    small: dict[str, Any] = {}
    for name, value in given.items():
        size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
        size = layers if size == LAYERS and isinstance(value, int) and value == depth else size
        if isinstance(value, list) and value and len(value) == depth:
            small[name] = (kinds * layers)[:layers] if name == "layer_types" else value[:layers]
        elif isinstance(nested := vars(config).get(name), PreTrainedConfig):
            small[name] = value | _small(nested)
        elif size is not None and (
            isinstance(value, (int, float)) or re.search("_id$|head_dim|_heads|experts$|experts_per_tok$", name)
        ):
            small[name] = size
    heads = [small.get(name) for name in ("num_attention_heads", "num_key_value_heads")]
    if all(heads) and given["num_attention_heads"] == given["num_key_value_heads"]:
        small["num_key_value_heads"] = heads[0]
    return small


def built(model_type: str, **settings: Any) -> Any:
    """A tiny random model of an architecture's default config with these settings."""
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(**_small(config_class()) | settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def outcome(model_type: str) -> Outcome:
    """How the architecture is served."""
    try:
        hf = built(model_type)
        with torch.inference_mode():
            hf(input_ids=torch.arange(1, 9)[None], use_cache=False)
    except Exception as error:  # noqa: BLE001 - of any architecture's config or code
        return Outcome(f"not tried: {type(error).__name__} in its small config")
    try:
        model = Model(hf, _byte_tokenizer(), model_type, CONTEXT)
    except (UnsupportedModelError, ValueError) as error:
        return Outcome(
            f"refused: {next((short for words, short in REASONS.items() if words in str(error)), str(error))}"
        )
    lacks = []
    for name in NAMES:
        try:
            model.points.resolve(Capture(points=[name]))
        except RequestError:
            lacks.append(name)
    return Outcome("together" if model.packs else "one at a time", ", ".join(f"`{name}`" for name in lacks))


def _send(model_type: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    pipe.send(outcome(model_type))


def _alone(model_type: str) -> Outcome:
    """The same in a process of its own, which may hang or fail."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else Outcome(f"not tried: longer than {LIMIT_S} s")
    except EOFError:
        return Outcome("not tried: its process ended")
    finally:
        process.kill()
        process.join()


def table() -> dict[str, Outcome]:
    """The rows of the page by architecture."""
    rows = PAGE.read_text().partition(HEADER)[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return {name: Outcome(served, lacks) for served, lacks, names in cells for name in re.findall(r"`(.+?)`", names)}


def main(model_types: Sequence[str]) -> None:
    """Try these architectures, by default all, and write the table if it is all of them."""
    found: dict[Outcome, list[str]] = {}
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result = _alone(model_type)
        print(model_type, *result, sep="\t", flush=True)
        found.setdefault(result, []).append(f"`{model_type}`")
    order = ["together", "one at a time", "refused", "not tried"]
    rows = sorted(found.items(), key=lambda row: (order.index(row[0].served.partition(":")[0]), -len(row[1]), row[0]))
    text = "".join(f"| {served} | {lacks} | {', '.join(names)} |\n" for (served, lacks), names in rows)
    if not model_types:
        before, _, rest = PAGE.read_text().partition(HEADER)
        PAGE.write_text(before + HEADER + text + "\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    main(sys.argv[1:])
