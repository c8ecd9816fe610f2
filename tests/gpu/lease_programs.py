#!/usr/bin/env python3
"""Programs that share the lease of this one.

    memory      Four programs each ask for 40 % of the lease's memory. At a line on stdin the second
                frees its memory and the third asks again. Then the first exits, and the last asks
                again. Prints `codes ...` three times.
    contexts    Programs start one after the other until there is no room for a context. Then the
                first exits, and one more starts. Prints `begun N`, `refused SECONDS ...` with the
                output of the refused one, and `then ...` with the output of the last.
"""

import os
import pathlib
import sys
import time

from parking import Program


def asked(program, mib):
    """Returns the result of an allocation."""
    program.say(f"alloc {mib}")
    return program.expect("alloc").split()[1]


def begin():
    """Starts a program, whose first line is `ready ...` or an error."""
    here = pathlib.Path(__file__).resolve().parent
    return Program([sys.executable, "mps_program.py"], dict(os.environ), sys.stderr, here)


def memory():
    """See above."""
    programs = [begin() for _ in range(4)]
    mib = [int(program.expect("ready").split()[2]) for program in programs][0] * 2 // 5
    print("codes", *(asked(program, mib) for program in programs), flush=True)
    # By now the server has seen each program's memory in the driver's figures.
    sys.stdin.readline()
    programs[1].say("free")
    programs[1].expect("free")
    print("codes", asked(programs[2], mib), flush=True)
    programs[0].end()
    end = time.monotonic() + 10
    while (code := asked(programs[3], mib)) != "0" and time.monotonic() < end:
        time.sleep(0.05)
    print("codes", code, flush=True)
    for program in programs[1:]:
        program.end()


def contexts():
    """See above."""
    programs = []
    while True:
        start, program = time.monotonic(), begin()
        said = program.line()
        if not said.startswith("ready"):
            break
        programs.append(program)
    print("begun", len(programs), flush=True)
    print("refused", round(time.monotonic() - start, 1), said, flush=True)
    program.end()
    programs.pop(0).end()
    last = begin()
    print("then", last.line(), flush=True)
    for program in [*programs, last]:
        program.end()


if __name__ == "__main__":
    {"memory": memory, "contexts": contexts}[sys.argv[1]]()
