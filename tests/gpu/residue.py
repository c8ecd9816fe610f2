"""`./run residue`: fresh memory holds nothing of the program before, whatever ended that one."""

import json
import os
import signal
import subprocess

import parking
from processes import wanted

KINDS = ("device", "pool", "created", "array", "managed", "pinned")
# Amounts in MiB: of the program that leaves a pattern, of others on a card, on a simulated one.
LEFT, MOST, SIMULATED = 8192, 1 << 20, 256
# Amount that the first one leaves on a simulated card, and of memory of the host, which
# `limits.staging` bounds.
FEW = 128
# Most managed memory that another program looks at: a client maps all of it in its own memory, too.
MANAGED = 16384


class Residue(parking.Parking):
    """Lets another client's program look for what a program has left."""

    def amount(self, kind, most):
        """Returns the MiB to allocate of a kind."""
        if kind == "pinned" or most == LEFT and not self.card:
            return FEW
        if not self.card:
            return SIMULATED
        return min(most, MANAGED) if kind == "managed" else most

    def leave(self, kind, native=False):
        """Starts a program that fills memory; returns it and its process number."""
        words = ["residue_program.py", "fill", kind, str(self.amount(kind, LEFT))]
        program = self.start(words, native=native)
        return program, int(program.expect("ready").split()[1])

    def look(self, name, kind, native=False):
        """Lets another program count what is left."""
        words = ["residue_program.py", "look", kind, str(self.amount(kind, MOST))]
        program = self.start(words, native=native, other=not native)
        pattern, other, words = (int(word) for word in program.expect("found").split()[1:])
        control, _, expected = (int(word) for word in program.expect("found").split()[1:])
        program.end()
        looked = f"{words * 4 >> 20} MiB, {pattern} words of the program before, {other} others"
        if control != expected:
            raise RuntimeError(f"{kind}: the look finds {control} of {expected} words that it wrote itself")
        if native:
            self.note(name, looked, "")
        else:
            self.check(f"{name}: {looked}", pattern == 0)

    def kill_worker(self, *_):
        """Kills the worker of the program."""
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        (pid,) = (row["pid"] for row in workers if row["state"] == "active")
        os.kill(pid, signal.SIGKILL)

    def ended(self, program):
        """Ends what is left of a program, and waits until its memory is free."""
        try:
            program.process.wait(5)
        except subprocess.TimeoutExpired:
            # A program whose worker is gone may wait for its input.
            program.end()
        self.wait_for_no_lease()
        self.settled()

    def parked(self, kind):
        """Looks while the program is parked; its memory is in the server's, and comes back."""
        program, _ = self.leave(kind)
        self.park(self.only_lease())
        self.look(f"parked, {kind}", kind)
        program.say("check")
        self.check(f"parked, {kind}: intact afterwards", program.line() == "intact")
        program.end()
        self.ended(program)

    def run(self):
        """Runs each kind with each end; returns the figures."""
        causes = {
            "exit": lambda program, _: program.process.stdin.close(),
            "kill -9": lambda _, pid: os.kill(pid, signal.SIGKILL),
            "kill -9 of its worker": self.kill_worker,
        }
        for kind in KINDS:
            # Simulated GPUs have no arrays.
            if (kind != "array" or self.card) and wanted(self.args, kind):
                if self.card:
                    native, pid = self.leave(kind, native=True)
                    os.kill(pid, signal.SIGKILL)
                    native.process.wait(20)
                    self.look(f"natively after kill -9, {kind}", kind, native=True)
                for cause, end in causes.items():
                    program, pid = self.leave(kind)
                    end(program, pid)
                    self.ended(program)
                    self.look(f"{cause}, {kind}", kind)
                    self.wait_for_no_lease()
                if kind in ("device", "created", "array") and not any("mps" in line for line in self.args.server_config):
                    self.parked(kind)
        return {"figures": self.rows, "failed": self.bad}
