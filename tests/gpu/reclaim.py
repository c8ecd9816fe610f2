"""`./run reclaim`: time until device memory is free after its program ends. The lease stays."""

import json
import os
import signal
import time

import parking

# Bounds in seconds: of a program whose machine is alive, and of a silent machine.
BOUND, SILENT = 2, 62
MIB = 1024


class Reclaim(parking.Parking):
    """Measures each cause once, until the card has the memory back."""

    def start_programs(self, count):
        """Starts programs that share an amount of memory; returns the card's memory in use."""
        before = self.settled()
        command, env = self.server.remote([self.args.python, "idle_program.py", str(MIB / 1024 / count)])
        started = [parking.Program(command, {**os.environ, **env}, self.log, self.here) for _ in range(count)]
        self.programs += started
        for program in started:
            program.expect("ready")
        during = self.used()
        if during - before < MIB:
            raise RuntimeError(f"{MIB} MiB in use do not show: {before} MiB before, {during} during")
        return started, during

    def measure(self, name, end, bound=BOUND, count=1, before=lambda _: None):
        """Ends programs in one way."""
        started, during = self.start_programs(count)
        for program in started:
            before(program)
        begun = time.monotonic()
        for program in started:
            end(program)
        # All memory except what idle workers keep.
        free = self.until(lambda: self.used() <= during - MIB, bound + 8)
        took = time.monotonic() - begun
        self.note(f"{name}: {MIB} MiB free again after", round(took, 2), "s")
        self.check(f"{name}: within {bound} s", free and took <= bound)
        for program in started:
            try:
                # Its forked child.
                os.killpg(program.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def fork_and_die(self, program):
        """Kills a program whose child survives."""
        program.say("fork")
        program.expect("forked")
        program.process.kill()

    def in_a_kernel(self, program):
        """Kills a program during a kernel of a minute."""
        program.say("kernel 60")
        # The start of work on the GPU is not visible from outside.
        time.sleep(0.5)

    def deaf(self, _):
        """Stops a program's worker, so that it does not even exit."""
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        (pid,) = (row["pid"] for row in workers if row["state"] == "active")
        os.kill(pid, signal.SIGSTOP)

    def silence(self, program):
        """Stops the client: the program, and the process that holds its lease."""
        for process in filter(None, (self.server.holder, program.process)):
            os.killpg(process.pid, signal.SIGSTOP)

    def run(self):
        """Runs all parts; returns True if all checks passed."""
        def kill(program):
            program.process.kill()

        self.measure("exit", lambda p: p.process.stdin.close())
        self.measure("abort", lambda p: p.process.send_signal(signal.SIGABRT))
        self.measure("kill -9", kill)
        self.measure("kill -9 of eight programs at once", kill, count=8)
        self.measure("kill -9 in the middle of a kernel", kill, before=self.in_a_kernel)
        self.measure("kill -9, and a worker that does not react", kill, before=self.deaf)
        self.measure("a fork that outlives its parent", self.fork_and_die)
        self.measure("exec of another program", lambda p: p.say("exec"))
        # The system tests check this with simulated GPUs.
        if self.card:
            self.measure("a client that is silent", self.silence, SILENT)
            os.killpg(self.server.holder.pid, signal.SIGKILL)
            self.server.stop()
            self.server.start()
        self.measure("gpuserver stop --force", lambda _: self.server.tool("stop", "--force"))
        return {"figures": self.rows, "failed": self.bad}
