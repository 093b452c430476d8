"""The examples of docstrings."""

from __future__ import annotations

import doctest
from typing import Any


def run(name: str, value: object, given: dict[str, Any]) -> dict[str, Any]:
    """Run the examples of a docstring with some names; gives all names after it."""
    (test,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=given)
    assert test.examples, f"{name} has no example"
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=told.append, clear_globs=False)
    assert not told, "".join(told)
    return test.globs
