"""Benchmarks: what they compare and how is in benchmarks/README.md and docs/benchmarks.md."""

import deployments  # noqa: F401  # before torch: it sets how OpenMP's threads wait, as for a server
