"""How each causal architecture of transformers is served, found and validated with tiny random models.

`python -m tests.deployments.model.architectures` writes docs/architectures.csv; with names, it only prints them.
"""

from __future__ import annotations

import csv
import multiprocessing
import re
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.errors import RequestError
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.model.validate import validate
from deployments.points.capture import Capture
from tests.deployments.conftest import CONTEXT, _byte_tokenizer
from vitrine.points import TRANSFORMER_LENS

TABLE = Path(__file__).parents[3] / "docs" / "architectures.csv"
LIMIT_S, LIMIT_BYTES, AT_ONCE = 120, 6 << 30, 2
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
    r"num_kv_shared_layers": 1,
    r"qk_head_dim": 16,
    r"rotary_dim": 8,
    r"initializer_range": 0.15,
    r"residual_multiplier": 0.22,  # by default, factors are 1
    r"(num_)?(hidden_|decoder_|encoder_)?layers?|n_layers?|num_(encoder|decoder|hidden)_layers": LAYERS,
    r"first_k_dense_replace|num_dense_layers|n_group|topk_group|n_shared_experts|num_nextn_predict_layers": 1,
    r"index_topk": 8,
    r"index_n_heads": 64,  # with few, scores of keys tie at 0, and any of those may be selected
    r".*(experts_per_tok|experts_per_token|top_?k|topk|top_k_experts)|moe_k": 2,
    r"(moe_)?(n|num)_(routed_|local_)?experts|moe_num_experts": 4,
    r".*(key_value|kv|kv_n)_heads": 2,
    r".*heads|n_head": 4,
    r".*head_dim": 8,
    r".*(lora_rank|_rank)": 16,
    r"hidden_size|d_model|n_embd|dim|word_embed_proj_dim|embedding_size|emb_dim|hidden_dim": 32,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|_mlp_dim|d_ff|n_inner|dim_ff)(_mlp)?": 48,
}

# What the small configs of single architectures also need.
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
QWEN4 = {**INDEXER, "indexer_budget": 8, "indexer_compress_ratio": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 5, "mamba_n_groups": 1, "mamba_chunk_size": 4}
OWN: dict[str, dict[str, Any]] = {
    "blt": {"encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32}},
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1], **MAMBA_2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], **MAMBA_2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"], "attention_head_size": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Words of a message -> what the table says.
REASONS = {
    "Error: ": "no cache in transformers' usual form",
    "no cache of transformers": "no cache in transformers' usual form",
    "logits differ": "logits that depend on padding, on later tokens, or on a cache that it lacks",
    "decoder layers": "no list of decoder layers",
}


class Outcome(NamedTuple):
    """How an architecture is served.

    Attributes:
        served: "together", "one at a time", or "refused: " or "not tried: " and the reason.
        lacks: The names of `NAMES` that some or all layers lack.
        wrong: Why an engine failed, or the points that `validate` found to be wrong.
        error: The largest error that it found.
    """

    served: str
    lacks: str = ""
    wrong: str = ""
    error: float = 0.0


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
            # Layers of the default config by their numbers, which the class finds by itself for others.
            small[name] = {key: value[key] for key in value if key != "per_layer_config"} | _small(nested)
        elif size is not None and (
            isinstance(value, (int, float)) or re.search("_id$|head_dim|_heads|experts$|experts_per_tok$", name)
        ):
            small[name] = size
    heads = [small.get(name) for name in ("num_attention_heads", "num_key_value_heads")]
    if all(heads) and given["num_attention_heads"] == given["num_key_value_heads"]:
        small["num_key_value_heads"] = heads[0]
    return small


def _merged(settings: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    nested = {
        name: _merged(settings[name], value) for name, value in others.items() if isinstance(settings.get(name), dict)
    }
    return settings | others | nested


def built(model_type: str, **settings: Any) -> Any:
    """A tiny random model of an architecture's default config with these settings."""
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(**_merged(_merged(_small(config_class()), OWN.get(model_type, {})), settings))
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
        reason = next((short for words, short in REASONS.items() if words in str(error)), str(error))
        return Outcome(f"refused: {reason}")
    except Exception as error:  # noqa: BLE001 - of its code, as a server would report it
        return Outcome(f"refused: {type(error).__name__} when it is loaded")
    lacks = []
    for name in NAMES:
        try:
            model.points.resolve(Capture(points=[name]))
        except RequestError:
            lacks.append(name)
    report = validate(model)
    failed = [line.rpartition("failed: ")[2] for line in report.skipped if "the engine failed" in line]
    points = dict.fromkeys(result.point for result in report.results if not result.ok)
    wrong = failed[:1] or ([f"{len(points)} points fail"] if len(points) > 3 else points)
    for line in report.skipped:
        print(f"{model_type}: {line}", file=sys.stderr)
    return Outcome("together" if model.packs else "one at a time", ", ".join(lacks), ", ".join(wrong), report.worst)


def _limited(model_type: str) -> Outcome:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    signal.alarm(LIMIT_S)  # ends the process
    return outcome(model_type)


def outcomes(model_types: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """The same of many, each in a process of its own, which may hang or fail."""
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        for name, result in [(name, pool.apply_async(_limited, (name,))) for name in model_types]:
            try:
                yield name, result.get(2 * LIMIT_S)
            except multiprocessing.TimeoutError:
                yield name, Outcome(f"not tried: its process ended, or took longer than {LIMIT_S} s")
            except Exception as error:  # noqa: BLE001 - of any architecture's code
                yield name, Outcome(f"not tried: {type(error).__name__} in its validation")


def table() -> dict[str, tuple[str, str]]:
    """How each architecture is served, and the names that it lacks."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: (row["served"], row["lacks"]) for row in rows for name in row["architectures"].split(", ")}


def main(model_types: Sequence[str]) -> None:
    """Try these architectures, by default all, and write the table if it is all of them."""
    found: dict[Outcome, list[tuple[str, float]]] = defaultdict(list)
    for name, result in outcomes(model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        print(name, *result, sep="\t", flush=True)
        found[result._replace(error=0.0)].append((name, result.error))
    if model_types:
        return
    order = ["together", "one at a time", "refused", "not tried"]
    rows = sorted(found.items(), key=lambda row: (order.index(row[0].served.partition(":")[0]), -len(row[1]), row[0]))
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["served", "largest error", "lacks", "architectures"])
        for (served, lacks, wrong, _), models in rows:
            error = wrong or f"{max(error for _, error in models):.0e}" if served in order[:2] else ""
            writer.writerow([served, error, lacks, ", ".join(sorted(name for name, _ in models))])


if __name__ == "__main__":
    main(sys.argv[1:])
