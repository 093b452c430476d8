"""Benchmarks; benchmarks/README.md lists their commands, docs/internals.md their results."""

import deployments  # noqa: F401  # before torch: it sets how OpenMP's threads wait, as for a server
