"""A client that runs programs in turn: reads a path per line, prints the program's output as a line of JSON."""

import contextlib
import io
import json
import runpy
import sys
import traceback

import nnsight  # noqa: F401 - once for all of them


def output(path):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:  # noqa: BLE001 - a program's failure is what the tests look at
            traceback.print_exc()
    return {"stdout": out.getvalue(), "stderr": err.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(output(line.strip())), flush=True)
