"""`./run fuzz`: random CUDA programs, natively and remotely: same memory, same results of calls."""

import concurrent.futures
import os
import re
import time

# Programs of one process: enough that its start costs little.
CHUNK = 200
# Repetitions of a process whose first program hangs natively. NVIDIA's driver loads its own code at
# the first use and waits for streams then, which may wait for the program.
REPEATS = 2
LINE = re.compile(r"^(\d+) (ok|WRONG|HANGS)\b ?([0-9a-f]{16})?(.*)$")


class Fuzz:
    """Runs the programs of `args.seeds` in several processes at a time."""

    def __init__(self, args, runner, here):
        self.args, self.runner, self.program = args, runner, str(here / "bin" / "cuda-fuzz")
        self.failed, self.calls, self.programs, self.end = [], 0, 0, None
        self.repeated = []

    def side(self, side, first, last):
        """Runs programs on one side; returns the line of each. A crash costs one program."""
        lines = {}
        repeats = REPEATS if side == "native" else 0
        while first < last:
            some, failure = self.process(side, first, last)
            if " HANGS" in some.get(first, "") and repeats:
                repeats -= 1
                self.repeated.append(first)
                continue
            lines.update(some)
            if not failure:
                break
            # The programs after the one that broke the process run in a new one.
            broken = max([first - 1, *some])
            if broken < first or " ok " in some[broken]:
                broken += 1
                lines[broken] = f"{broken} CRASHED: {failure}"
            first = broken + 1
        return lines

    def process(self, side, first, last):
        """Runs programs in one process; returns the line of each, and why it failed."""
        command = [self.program, "run", "--seeds", f"{first}..{last}", "--spin", str(self.args.spin)]
        result = self.runner.run(side, f"fuzz-{first}", command, limit=600)
        lines = {}
        for line in result.lines():
            found = LINE.match(line)
            if found:
                lines[int(found[1])] = line
            elif line.startswith("    ") and lines:
                lines[max(lines)] += "\n" + line
        if result.status in (0, 1):
            broken = "fuzz: stopped" in result.out
            return lines, "the context is broken" if broken else ""
        return lines, result.failure()

    def chunk(self, first, last):
        """Compares both sides for some seeds."""
        if self.end is not None and time.monotonic() > self.end:
            return
        native, remote = self.side("native", first, last), self.side("remote", first, last)
        for seed in range(first, last):
            sides = native.get(seed), remote.get(seed)
            found = [LINE.match(line.splitlines()[0]) for line in sides if line]
            self.programs += 1
            if len(found) == 2 and all(found) and found[0][2] == found[1][2] == "ok" and found[0][3] == found[1][3]:
                self.calls += int(re.search(r"calls (\d+)", sides[1])[1])
            else:
                self.failed.append(seed)
                for side, line in zip(("native", "remote"), sides):
                    print(f"seed {seed}: {side}: {line}", flush=True)

    def run(self):
        """Runs all chunks; returns the result."""
        first, _, last = self.args.seeds.partition("..")
        first, last = (0, int(first)) if not last else (int(first), int(last))
        began = time.monotonic()
        self.end = began + self.args.budget if self.args.budget else None
        starts = range(first, last, CHUNK)
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs or os.cpu_count()) as pool:
            for done in [pool.submit(self.chunk, start, min(start + CHUNK, last)) for start in starts]:
                done.result()
        seconds = round(time.monotonic() - began)
        if self.repeated:
            print(f"fuzz: {len(self.repeated)} native processes hung in their first program, and were repeated: {sorted(self.repeated)}")
        print(f"fuzz: {self.programs} programs, {self.calls} calls, {len(self.failed)} failed, {seconds} s")
        return {"programs": self.programs, "calls": self.calls, "failed": self.failed, "repeated": self.repeated, "seconds": seconds}
