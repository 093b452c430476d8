"""Loads a model into an engine with the given options, or raises a `LoadError` with the reason."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING, Any

from deployments import __version__
from deployments.activations.facts import public_uri
from deployments.errors import LoadError, RequestError
from deployments.model_files.names import located, source
from deployments.options import Options
from deployments.points.names import dtype_name

if TYPE_CHECKING:  # the replica's module is also imported without torch
    from deployments.engine.engine import Engine
    from deployments.model.model import Model

PACKAGES = ("torch", "transformers", "nnsight", "tokenizers", "ray")


def load_engine(options: Options) -> Engine:
    """Load the model into an engine, on this thread.

    Raises:
        LoadError: The model cannot be loaded; has the HTTP status and a code.
    """
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    from deployments.model.device_memory import is_out_of_memory
    from deployments.model.packing import UnsupportedModelError

    try:
        if options.num_gpus and not options.on_cpu:
            _check_cuda()
        return _engine(options)
    except LoadError:
        raise
    except RequestError as error:  # an invalid savepoint
        raise LoadError(error.message, error.field, error.code, error.status) from error
    except UnsupportedModelError as error:
        raise LoadError(str(error), "model_id", "unsupported_model") from error
    except Exception as error:  # of any library; each becomes a LoadError with a code
        if is_out_of_memory(error):
            raise LoadError(f"there is not enough memory for it: {error}", None, "out_of_memory", 500) from error
        if isinstance(error.__cause__, GatedRepoError):
            raise LoadError(str(error), "model_id", "model_gated", 403) from error
        # transformers raises OSError without an errno if a repository, revision or file does not exist or the hub is
        # unreachable, and ValueError for an unknown architecture or for code that it would have to run.
        if isinstance(error, OSError) and error.errno is None:
            field = "revision" if isinstance(error.__cause__, RevisionNotFoundError) else "model_id"
            raise LoadError(str(error), field, "model_not_found", 404) from error
        if isinstance(error, (ValueError, ImportError)):
            raise LoadError(str(error), "model_id", "unsupported_model") from error
        raise LoadError(f"{type(error).__name__}: {error}", None, "load_failed", 500) from error


def _check_cuda() -> None:
    """Raise if torch cannot use the GPU that Ray gave this replica."""
    import torch

    if torch.cuda.is_available():
        return
    cause = f"torch {torch.__version__} is a build for CPUs; install one for CUDA"
    if torch.version.cuda:
        cause = f"torch was built for CUDA {torch.version.cuda}, and the driver may be older; check nvidia-smi"
    message = f"Ray gave this replica a GPU, but torch finds none: {cause}, or serve on the CPU with num_gpus=0"
    raise LoadError(message, None, "no_gpu", 500)


def _engine(options: Options) -> Engine:
    import torch

    from deployments.engine.engine import Engine
    from deployments.model.load import load

    # Ray sets OMP_NUM_THREADS to the actor's CPUs; a fraction of a CPU becomes one thread.
    torch.set_num_threads(_threads(options))
    model = load(
        source(options.model, options.models_dir),
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        device_map=options.device_map,
        trust_remote_code=options.trust_remote_code,
        context=options.max_seq_len,
        attention=options.attention,
        share=options.allow_client_code,
        batch_invariant=options.batch_invariant,
        adapter=str(located(options.adapter, options.models_dir, "adapter")) if options.adapter else None,
    )
    model.points.name(options.savepoints)
    return Engine(
        model,
        max_running=options.max_running,
        prefill_tokens=options.prefill_tokens,
        kv_bytes=options.kv_bytes,
        kv_fraction=None if options.kv_bytes else float(options.kv_fraction) / _sharing(options, model.device.type),
        capture_bytes=options.capture_memory_bytes,
        cuda_graphs=options.cuda_graphs == "auto",
    )


def _drawing(hf: Any) -> dict[str, Any]:
    """The publisher's sampling settings; empty for greedy decoding. They do not change requests."""
    own = getattr(hf, "generation_config", None)
    if own is None or not own.do_sample:
        return {}
    settings = {"temperature": own.temperature or 1.0, "top_p": own.top_p, "top_k": own.top_k}
    return {name: value for name, value in settings.items() if value is not None}


def _threads(options: Options) -> int:
    return options.threads or max(1, (os.cpu_count() or 1) // options.most_replicas)


def _sharing(options: Options, device: str) -> int:
    """How many replicas may share the same free memory: all on a CPU, as they may start on one node."""
    if device == "cpu":
        return options.most_replicas
    return int(1 / options.num_gpus) if options.num_gpus and options.num_gpus < 1 else 1


def description(options: Options, model: Model) -> dict[str, Any]:
    """A loaded model as `/v1/models` shows it, with everything that is needed to serve it again.

    Options with a default that depends on the model or the machine have their actual values. The API key file and
    settings of URIs are left out.
    """
    import torch

    came_out = {
        "dtype": dtype_name(model.dtype),
        "attention": getattr(model.hf.config, "_attn_implementation", None),
        "device": str(model.device),
        "max_seq_len": model.context,
        "threads": _threads(options),
        "archive": options.archive and public_uri(options.archive),
    }
    return {
        "max_model_len": model.context,
        "device_name": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
        # Forward passes of different shapes add in different orders, which in 16 bits can swap two likely tokens.
        "tokens_depend_on_batch": model.dtype.itemsize < 4 and not model.batch_invariant,
        "savepoints": [savepoint.model_dump() for savepoint in options.savepoints],
        "generation_config": _drawing(model.hf),
        "revision": model.revision,
        "source": model.hf.name_or_path,
        "adapter_revision": model.adapter_revision,
        "quantization": model.quantization,
        "options": options.model_dump(mode="json", exclude={"api_keys_file"}) | came_out,
        "versions": {"python": platform.python_version(), "vitrine": __version__}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
