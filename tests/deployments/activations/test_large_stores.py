"""A run of a large store is loaded in little memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow.fs as pafs

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.facts import RunFacts
from deployments.activations.files.places import Place
from deployments.activations.writer.writer import Writer

REPOSITORY = Path(__file__).parents[3]
PARTS, RUNS, TEXT = 100, 20, "x" * 30_000  # parts of a manifest, runs of each, and what each run says: 60 MB
MOST_MIB = 180  # of which 64 are the cache of a catalogue's database: all runs with their indexes take 240

LOAD = """
import sys
from pathlib import Path
import pyarrow.fs as pafs
from deployments.activations import load
from deployments.activations.files.places import Place

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10

root = Path(sys.argv[1])
[path] = root.glob("session/*.arrow")
assert load(path, verify=True).facts.run_id == "r"
before = peak()
assert load(Place(pafs.LocalFileSystem(), str(root), root.as_uri(), "id"), "r").facts.run_id == "r"
print(peak() - before)
"""


def test_a_run_of_a_bucket_is_loaded_without_all_of_its_runs_in_memory(make, tmp_path):
    writer = Writer(tmp_path, catalogue := Catalogue())
    made = make("r")
    writer.submit(made.facts, made.batches).result()
    writer.close()
    entry = catalogue.find("r")
    [path] = tmp_path.glob("session/*.arrow")
    at = {"bytes": entry.bytes, "rows": entry.rows, "first_row": entry.first_row, "offset": entry.offset}
    line = {"bytes": path.stat().st_size, "rows": entry.rows, "points": entry.points}
    manifest = Manifest(Place(pafs.LocalFileSystem(), str(tmp_path), tmp_path.as_uri()))
    (tmp_path / ".manifest").mkdir()
    manifest.write([{**line, "segment": f"session/{path.name}", "runs": [{"facts": asdict(entry.facts), **at}]}])
    for part in range(PARTS):
        many = [RunFacts(f"{part}-{i}", "other", "model", float(i), 1, 2, tags={"note": TEXT}) for i in range(RUNS)]
        runs = [{"facts": asdict(facts), **at} for facts in many]
        manifest.write([{**line, "segment": f"other/{part}.arrow", "runs": runs}])
    grown = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert int(grown.stdout) < MOST_MIB
