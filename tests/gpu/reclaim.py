"""`./run reclaim`: how soon device memory is free again, whatever ends its program. The lease stays."""

import json
import os
import signal
import time

import parking

# Seconds, of a program whose machine is alive, and of a silent machine.
BOUND, SILENT = 2, 62
MIB = 1024


class Reclaim(parking.Parking):
    """Each cause once: from the cause to the moment at which the card has the memory back."""

    def start_programs(self, count):
        """Programs that share the memory in use among them; what the card has in use with them."""
        before = self.settled()
        command, env = self.server.remote([self.args.python, "idle_program.py", str(MIB / 1024 / count)])
        started = [parking.Program(command, {**os.environ, **env}, self.log, self.here) for _ in range(count)]
        self.programs += started
        for program in started:
            program.expect("ready")
        during = self.used()
        if during - before < MIB:
            raise RuntimeError(f"{MIB} MiB in use are not seen: {before} MiB before, {during} during")
        return started, during

    def measure(self, name, end, bound=BOUND, count=1, before=lambda _: None):
        """End programs in one way."""
        started, during = self.start_programs(count)
        for program in started:
            before(program)
        begun = time.monotonic()
        for program in started:
            end(program)
        # Everything but what idle workers keep.
        free = self.until(lambda: self.used() <= during - MIB, bound + 8)
        took = time.monotonic() - begun
        self.note(f"{name}: {MIB} MiB free again after", round(took, 2), "s")
        self.check(f"{name}: within {bound} s", free and took <= bound)
        for program in started:
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

    def in_a_kernel(self, program):
        """It is in the middle of a kernel of a minute."""
        program.say("kernel 60")
        # Nothing tells from outside that the GPU has begun.
        time.sleep(0.5)

    def deaf(self, _):
        """Its worker does nothing any more, not even end."""
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        (pid,) = (row["pid"] for row in workers if row["state"] == "active")
        os.kill(pid, signal.SIGSTOP)

    def silence(self, program):
        """All that is the client's stands still: the program, and what holds its lease."""
        for process in filter(None, (self.server.holder, program.process)):
            os.killpg(process.pid, signal.SIGSTOP)

    def run(self):
        """Everything; whether it was as it has to be."""
        def kill(program):
            program.process.kill()

        self.measure("exit", lambda p: p.process.stdin.close())
        self.measure("abort", lambda p: p.process.send_signal(signal.SIGABRT))
        self.measure("kill -9", kill)
        self.measure("kill -9 of eight programs at once", kill, count=8)
        self.measure("kill -9 in the middle of a kernel", kill, before=self.in_a_kernel)
        self.measure("kill -9, and a worker that does not react", kill, before=self.deaf)
        self.measure("a fork that outlives its parent", self.fork_and_die)
        # Booted hosts show it with simulated GPUs.
        if self.card:
            self.measure("a client that is silent", self.silence, SILENT)
            os.killpg(self.server.holder.pid, signal.SIGKILL)
            self.server.stop()
            self.server.start()
        self.measure("gpuserver stop --force", lambda _: self.server.tool("stop", "--force"))
        return {"figures": self.rows, "failed": self.bad}
