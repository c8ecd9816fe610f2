#!/usr/bin/env python3
"""Four programs with the lease of this one: each asks for 40 % of its memory; then the first ends, and the last asks again."""

import os
import pathlib
import sys
import time

from parking import Program


def asked(program, mib):
    """The result of an allocation."""
    program.say(f"alloc {mib}")
    return program.expect("alloc").split()[1]


def main():
    """Prints `codes ...` twice."""
    here = pathlib.Path(__file__).resolve().parent
    programs = [Program([sys.executable, "mps_program.py"], dict(os.environ), sys.stderr, here) for _ in range(4)]
    mib = [int(program.expect("ready").split()[2]) for program in programs][0] * 2 // 5
    print("codes", *(asked(program, mib) for program in programs), flush=True)
    programs[0].end()
    end = time.monotonic() + 10
    while (code := asked(programs[3], mib)) != "0" and time.monotonic() < end:
        time.sleep(0.05)
    print("codes", code, flush=True)
    for program in programs[1:]:
        program.end()


if __name__ == "__main__":
    main()
