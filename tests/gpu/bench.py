"""Runs measurements of several scripts in one process with PyTorch: bench.py [--quick] NAME..."""

import importlib
import json
import sys
import traceback


def main():
    """Runs one script after the other; a failure is reported and does not stop the others."""
    quick = "--quick" in sys.argv
    failed = 0
    for name in sys.argv[1:]:
        if name.startswith("--"):
            continue
        try:
            importlib.import_module(name).bench(quick)
        except Exception as error:  # pylint: disable=broad-except
            failed = 1
            traceback.print_exc()
            print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
