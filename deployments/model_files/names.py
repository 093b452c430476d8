"""Resolves a model's name to a directory that transformers can load, or to a repository of the hub."""

from __future__ import annotations

from pathlib import Path

from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.options import DEMO, GGUF, SMOLLM2, default_models_dir


def source(model: str, models_dir: str | None = None) -> str:
    """The directory or repository of a model's name, on the machine that loads it.

    In this order: `vitrine-demo`, the model that ships; the absolute path of a directory, or of a GGUF file, which is
    converted to a directory if needed; a directory in `models_dir`; a repository of the hub.

    Args:
        model: The value of the option `model`.
        models_dir: The directory of models that are named without a path; by default `$VITRINE_HOME/models`.

    Raises:
        LoadError: There is no such model here, or the GGUF file cannot be converted.
    """
    place = located(model, models_dir)
    return _converted(place) if isinstance(place, Path) and place.suffix == GGUF else str(place)


def located(model: str, models_dir: str | None = None, field: str = "model_id") -> Path | str:
    """The directory, GGUF file or repository of a name, without conversion. Arguments as for `source`.

    Errors name `field`.

    Raises:
        LoadError: There is no such model here.
    """
    if model == DEMO:
        return WEIGHTS
    if (local := Path(models_dir or default_models_dir(), model)).is_dir():
        return local
    if model == SMOLLM2:
        message = f"there is no {local}: run `make smollm2`, which writes {default_models_dir() / SMOLLM2}"
        raise LoadError(message, field, "model_not_found", 404)
    given = Path(model).expanduser()
    if given.is_dir() and not given.is_absolute():
        # A client's name may match a local directory by chance; an operator cannot know where a replica runs.
        message = f"{model!r} is a directory on the replica's machine: give its absolute path"
        raise LoadError(message, field, "model_not_found", 404)
    if given.is_dir():
        return given
    if given.suffix != GGUF:
        return model
    if not given.is_absolute():  # as for a directory
        message = f"a GGUF file is named by its absolute path, which {model!r} is not"
        raise LoadError(message, field, "model_not_found", 404)
    if not given.is_file():
        raise LoadError(f"there is no file {given}", field, "model_not_found", 404)
    return given


def _converted(file: Path) -> str:
    from deployments.model_files.gguf import kept  # imports torch

    return str(kept(file, default_models_dir()))
