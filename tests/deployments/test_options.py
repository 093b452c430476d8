"""An operator's mistake is refused by the option's name."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

import serve_app
from deployments.options import Options


@pytest.mark.parametrize(
    "given",
    [
        {"modle": "x"},
        {"num_replicas": "many"},
        {"num_replicas": 0},
        {"dtype": "float8"},
        {"attention": "lazy"},
        {"max_running": -1},
    ],
)
def test_an_unknown_or_bad_option_is_refused_by_name(given):
    with pytest.raises(ValidationError, match=next(iter(given))):
        Options.model_validate(given)


def test_options_come_as_text_from_the_command_line():
    options = Options.model_validate({"model": "some/model", "num_replicas": "2", "num_gpus": "0.5"})
    assert (options.num_replicas, options.num_gpus, options.served_name) == (2, 0.5, "some/model")


def test_serve_run_checks_the_options_because_the_builder_names_their_type():
    (parameter,) = inspect.signature(serve_app.build_app).parameters.values()
    assert parameter.annotation is Options
