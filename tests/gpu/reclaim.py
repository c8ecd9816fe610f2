"""`./run reclaim`: how soon device memory is free again, whatever ends its program. The lease stays."""

import os
import signal
import time

import parking

# Seconds, of a program whose machine is alive, and of a silent machine.
BOUND, SILENT = 2, 62
MIB = 1024


class Reclaim(parking.Parking):
    """Each cause once: from the cause to the moment at which the card has the memory back."""

    def program(self):
        """A program with memory in use; the card's use without it and with it."""
        before = self.settled()
        command, env = self.server.remote([self.args.python, "idle_program.py", str(MIB / 1024)])
        program = parking.Program(command, {**os.environ, **env}, self.log, self.here)
        self.programs.append(program)
        program.expect("ready")
        during = self.used()
        if during - before < MIB:
            raise RuntimeError(f"{MIB} MiB in use are not seen: {before} MiB before, {during} during")
        return program, during

    def measure(self, name, end, bound=BOUND):
        """End a program in one way."""
        program, during = self.program()
        begun = time.monotonic()
        end(program)
        # Everything but what idle workers keep.
        free = self.until(lambda: self.used() <= during - MIB, bound + 8)
        took = time.monotonic() - begun
        self.note(f"{name}: {MIB} MiB free again after", round(took, 2), "s")
        self.check(f"{name}: within {bound} s", free and took <= bound)
        try:
            # What it has forked.
            os.killpg(program.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def fork_and_die(self, program):
        """Its child lives on."""
        program.say("fork")
        program.expect("forked")
        program.process.kill()

    def silence(self, program):
        """All that is the client's stands still: the program, and what holds its lease."""
        for process in filter(None, (self.server.holder, program.process)):
            os.killpg(process.pid, signal.SIGSTOP)

    def run(self):
        """Everything; whether it was as it has to be."""
        self.measure("exit", lambda p: p.process.stdin.close())
        self.measure("abort", lambda p: p.process.send_signal(signal.SIGABRT))
        self.measure("kill -9", lambda p: p.process.kill())
        self.measure("a fork that outlives its parent", self.fork_and_die)
        # Booted hosts show it with simulated GPUs.
        if self.card:
            self.measure("a client that is silent", self.silence, SILENT)
            os.killpg(self.server.holder.pid, signal.SIGKILL)
            self.server.stop()
            self.server.start()
        self.measure("gpuserver stop --force", lambda _: self.server.tool("stop", "--force"))
        return {"figures": self.rows, "failed": self.bad}
