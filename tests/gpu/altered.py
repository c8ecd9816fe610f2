"""`./run altered`: programs whose frames change on the way to their workers harm nothing else.

The relay of tests/faults stands where the server says that its data port is. It puts other words
into some frames, as a program sends them that means harm: numbers, and words of earlier frames,
such as handles and addresses. The results of these programs count for nothing. No worker may panic
or be killed by a signal, and afterwards random programs compute as they should.
"""

import concurrent.futures
import os
import re

from faults import Relay
from processes import progress

# Frames of which one changes on average.
FRAMES = 30
# Longest run of a program with such frames: it may wait for what it did not order.
LIMIT = 5
# Programs that compute afterwards.
AFTERWARDS = 20
DEATH = re.compile(r"panicked at .*|killed by SIG\w+.*")


class Altered:
    """Runs the programs of `args.seeds` with changed frames."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here = args, server, runner, here
        self.log = args.out / "server.log"
        self.relay = None

    def one(self, seed):
        """Runs one program, whatever becomes of it."""
        command = [str(self.here / "bin/cuda-fuzz"), "run", "--seeds", f"{seed}..{seed + 1}"]
        self.runner.run("remote", f"altered-{seed}", command, limit=LIMIT)

    def run(self):
        """Runs all programs, and others afterwards; returns the result."""
        first, _, last = self.args.seeds.partition("..")
        first, last = (0, int(first)) if not last else (int(first), int(last))
        self.relay = Relay(self.args, self.here, 0, self.args.fault_seed, FRAMES)
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs or os.cpu_count()) as pool:
            list(pool.map(self.one, range(first, last)))
        said = self.relay.stop()
        frames = int(said.split()[1]) if said.startswith("altered: ") else 0
        progress(f"  {last - first} programs, {frames} frames changed")
        failed = [] if frames >= last - first else [f"only {frames} frames changed"]
        failed += DEATH.findall(self.log.read_text(errors="replace"))
        if not self.server.alive():
            failed.append("the server exited")
            self.server.start()
        self.relay = Relay(self.args, self.here, 0, 1)
        command = [str(self.here / "bin/cuda-fuzz"), "run", "--seeds", f"0..{AFTERWARDS}"]
        after = self.runner.run("remote", "altered-afterwards", command, limit=120)
        if after.status != 0:
            failed.append(f"a program fails afterwards: {after.failure()}")
        for why in failed:
            progress(f"  FAILED: {why}")
        return {"programs": last - first, "frames": frames, "failed": failed}

    def stop(self):
        """Stops the relay."""
        if self.relay is not None:
            self.relay.stop()
