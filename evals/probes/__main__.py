"""`python -m evals.probes --session NAME --label TAG --group TAG --out DIR`: linear probes on stored activations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Fit probes and write what they found.

    Args:
        argv: The options; without it the process's own.

    Returns:
        0; 2 where the options or the stored runs do not allow it, with the reason on stderr.
    """
    try:
        from evals.probes import sweep
    except ImportError as error:
        print(f"evals.probes: {error}", file=sys.stderr)
        return 2
    from deployments.permissions import restrict
    from evals.config import EvalError
    from evals.probes.sweep_options import parse

    try:
        options = parse(argv)
        assert options.out is not None
        restrict(options.out)
        result = sweep(**vars(options))
    except (EvalError, OSError) as error:
        print(f"evals.probes: {error}", file=sys.stderr)
        return 2
    print(render(result.document))
    print(options.out / "report.html")
    if options.install is not None:
        from deployments.errors import RequestError
        from deployments.readouts.sending import install

        file = options.out / f"{options.probe_name}.safetensors"
        try:
            kept = install(options.install, file.read_bytes())
        except RequestError as error:
            print(f"evals.probes: {file} was not installed: {error}", file=sys.stderr)
            return 2
        print(f'installed as {kept["name"]}: send "readouts": ["{kept["name"]}"]')
    return 0


def render(document: dict[str, Any]) -> str:
    """The headline as some lines of text."""
    own = document["headline"]
    others = [
        f"{name} {own[key]:.3f}"
        for name, key in {"permuted labels": "control_auroc", "text": "text_auroc", "length": "length_auroc"}.items()
        if own[key] is not None
    ]
    lines = [
        f"AUROC {own['auroc']:.3f}, {_bounds(own)}; {own['n']} examples in {own['groups']} groups; "
        + ", ".join(others),
        f"probe at {own['point']}, tokens {own['tokens']}, {own['method']}; chosen in the folds: {_chosen(own)}",
    ]
    lines += [f"on {test['session']}: AUROC {test['auroc']:.3f}, {_bounds(test)}" for test in document["transfer"]]
    if left := [f"{count} {reason}" for reason, count in document["left_out"].items()]:
        lines.append(f"runs left out: {', '.join(left)}")
    return "\n".join([*lines, *own["faults"]])


def _bounds(figures: dict[str, Any]) -> str:
    if figures["auroc_low"] is None:
        return "no interval: " + str(figures["reasons"].get("auroc_low", ""))
    return f"95% interval {figures['auroc_low']:.3f} to {figures['auroc_high']:.3f}"


def _chosen(own: dict[str, Any]) -> str:
    return ", ".join(choice["point"] for choice in own["chosen"])


if __name__ == "__main__":
    sys.exit(main())
