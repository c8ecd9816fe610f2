"""`./run altered`: frames that change on their way harm nothing else.

The relay of tests/faults stands where the server says that its data port is. It puts other words
into some frames to the workers, as a program does that means harm, and then into frames to the
programs, as a server does: numbers, and words of earlier frames, such as handles and addresses.
The results of these programs count for nothing. No worker may panic or be killed by a fault, nor a
program that stops at the first failure of a call, and afterwards random programs compute as they
should.
"""

import concurrent.futures
import os
import re
import signal

from faults import Relay
from processes import progress

# Frames of which one changes on average.
FRAMES = 30
# Longest run of a program with such frames: it may wait for an answer that does not come.
LIMIT = 5
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
# Programs that compute afterwards.
AFTERWARDS = 20
DEATH = re.compile(r"panicked at .*|killed by SIG\w+.*")


class Altered:
    """Runs the programs of `args.seeds` with changed frames."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here = args, server, runner, here
        self.log = args.out / "server.log"
        self.relay = None

    def one(self, way, seed):
        """Runs one program; returns its fault, whatever it computes."""
        command = [str(self.here / "bin/cuda-fuzz"), "run", "--seeds", f"{seed}..{seed + 1}"]
        # Towards workers, programs continue after failures, and may use memory they do not have.
        command += ["--strict"] * (way == "down")
        result = self.runner.run("remote", f"altered-{way}-{seed}", command, limit=LIMIT)
        panicked = re.search(r"panicked at intercept/\S+", result.err)
        if panicked or way == "down" and -result.status in FAULTS:
            return f"seed {seed} {way}: {panicked[0] if panicked else result.failure()}"
        return ""

    def altered(self, way, first, last):
        """Runs all programs while frames in one direction change; returns number and failures."""
        self.relay = Relay(self.args, self.here, 0, self.args.fault_seed, FRAMES, down=way == "down")
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs or os.cpu_count()) as pool:
            failed = [why for why in pool.map(lambda seed: self.one(way, seed), range(first, last)) if why]
        said = self.relay.stop()
        frames = int(said.split()[1]) if said.startswith("altered: ") else 0
        progress(f"  {last - first} programs, {frames} frames {way} changed")
        return frames, failed if frames >= (last - first) / 4 else [*failed, f"only {frames} frames {way} changed"]

    def run(self):
        """Runs all programs, and others afterwards; returns the result."""
        first, _, last = self.args.seeds.partition("..")
        first, last = (0, int(first)) if not last else (int(first), int(last))
        (up, failed), (down, more) = (self.altered(way, first, last) for way in ("up", "down"))
        failed += more + DEATH.findall(self.log.read_text(errors="replace"))
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
        return {"programs": last - first, "frames_up": up, "frames_down": down, "failed": failed}

    def stop(self):
        """Stops the relay."""
        if self.relay is not None:
            self.relay.stop()
