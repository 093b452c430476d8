"""Points probed in tasks of Ray are those probed here."""

from pathlib import Path

import pytest
import ray
from probed import statements, store

from evals.config import EvalError
from evals.probes import sweep


@pytest.mark.long
def test_a_sweep_by_ray_is_the_same(tmp_path: Path) -> None:
    made = statements(groups=20)
    for one in made[:4]:
        one.rows["layers.2.output"].fill_(float("nan"))
    given = {"session": "s", "group": "group", "store": store(tmp_path, "s", made), "permutations": 2, "resamples": 100}
    good = given | {"points": ["layers.0.output", "layers.1.output"]}
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        far, near = sweep(ray="auto", **good), sweep(**good)
        with pytest.raises(EvalError, match="4 of 80 examples have values that are not finite"):
            sweep(ray="auto", **given)
    finally:
        ray.shutdown()
    assert far.rows == near.rows
    assert far.headline == near.headline
