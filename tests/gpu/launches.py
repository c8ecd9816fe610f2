#!/usr/bin/env python3
"""launches.py N: N launches of a kernel with one block and N with two, then one wait for all."""

import sys

from mps_program import Program


def main():
    """Exit status 1 if a call fails."""
    program = Program()
    for _ in range(int(sys.argv[1])):
        for blocks in (1, 2):
            if code := program.launch(blocks, 1, program.out.value):
                sys.exit(f"cuLaunchKernel: error {code}")
    program.must("cuCtxSynchronize")


if __name__ == "__main__":
    main()
