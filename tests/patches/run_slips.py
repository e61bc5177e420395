"""Runs single cases of a behaviour check, each on files of its own, in one process: python run_slips.py CHECK PRISTINE.

Reads lines {"patched", "kernel", "case"} and writes the check's result for each, in order.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

# Read by Triton when a kernel is decorated.
os.environ["TRITON_INTERPRET"] = "1"


def main(check_path: str, pristine: str) -> None:
    spec = importlib.util.spec_from_file_location("check", check_path)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name.
    sys.modules["check"] = check
    spec.loader.exec_module(check)
    sys.meta_path.insert(0, check.StandInFinder())
    check.patch_device_functions_once()
    cases = {(case.kernel, case.name): case for case in check.all_cases()}
    for line in sys.stdin:
        wanted = json.loads(line)
        case = cases[wanted["kernel"], wanted["case"]]
        sides = check.Sides(
            check.load_kernels(Path(pristine), case.path), check.load_kernels(Path(wanted["patched"]), case.path), "cpu"
        )
        sys.stdout.write(json.dumps(check.run_case(case, sides)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
