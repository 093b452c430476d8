"""Imported before Ray by what needs it, to print how to install the server if it is missing."""

from importlib.util import find_spec

if getattr(find_spec("ray"), "origin", None) is None:  # not by a directory of that name
    raise ImportError("the server is not installed: in Vitrine's clone, pip install -c constraints.txt -e '.[serve]'")
