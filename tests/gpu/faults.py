"""`./run faults`: programs that are disturbed in many ways compute as natively.

A fault happens after each few lines of a program's output, at a random moment. The relay of
tests/faults stands where the server says that its data port is. Under faults of the client's daemon
the programs use the daemon's lease, as in a login.
"""

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import time

import daemon_client
from daemon_client import LOGIN, DaemonClient
from descriptor_store import DescriptorStore
from processes import kill_group, progress, wanted
from verdicts import difference

# Where the server says that its data port is; the relay listens there.
RELAY = "127.0.0.2"
# Frames that a connection has on average in one direction, where connections break by themselves.
UNITS = 60
# Longest run of an undisturbed program, and the longest wait for a few lines, in seconds.
LIMIT, LINE_LIMIT = 300, 120
# More steps than a program computes, and the fewest lines that tell its pace.
STEPS, PACE_LINES = 1000000, 8


@dataclasses.dataclass
class Program:
    """A program that prints a line with each step; the number of steps is its last argument.

    More steps do not change the lines of the first ones."""

    command: list
    # Lines of output from one fault to the next, and the longest pause before it in seconds.
    lines: int
    step: float
    torch: bool = False


@dataclasses.dataclass
class Kind:
    """A kind of fault: its part of the wanted number, its length in seconds, and the fault."""

    share: float
    shortest: float
    longest: float
    happen: object
    # Whether the relay breaks connections by itself instead.
    random: bool = False
    # Whether the program computes meanwhile, so that the fault's length is no loss.
    continues: bool = False
    # Whether the programs use a daemon's lease. These kinds come last.
    daemon: bool = False
    # Whether the server's control process is replaced.
    server: bool = False


class Relay:
    """The process of the relay."""

    def __init__(self, args, here, units, seed, alter=0, down=False):
        command = [str(here / "bin/faulty-relay"), "--listen", f"{RELAY}:{args.data_port}"]
        command += ["--to", f"127.0.0.1:{args.data_port}", "--units", str(units), "--seed", str(seed), "--alter", str(alter)] + ["--down"] * down
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.expect("ready")

    def expect(self, line):
        """Reads a line, which has to be this one."""
        if (said := self.process.stdout.readline().strip()) != line:
            raise RuntimeError(f"the relay says: {said or 'nothing'}")

    def say(self, line):
        """Starts a fault."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.expect("done")

    def stop(self):
        """Ends the relay, which closes its connections; returns its summary."""
        try:
            return self.process.communicate(timeout=20)[0].strip()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return ""


class Faults:
    """Runs each program under each kind of fault."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here = args, server, runner, here
        self.random = random.Random(args.fault_seed)
        self.rows, self.natively, self.paces = [], {}, {}
        self.relay = self.client = None
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-store-")
        self.store = DescriptorStore(f"{self.folder.name}/notify")
        python = args.python
        self.programs = {
            "steps": Program([python, "steps.py"], 4, 0.05),
            "gpt2": Program([python, "train_gpt2.py", "--deterministic", "--steps"], 2, 0.5, True),
            "generate": Program([python, "generate_gpt2.py", "--repeat"], 1, 1.0, True),
        }
        self.kinds = {
            "reset": Kind(1, 0, 0, lambda _: self.relay.say("reset")),
            "bytes": Kind(1, 0, 0, lambda _: None, random=True),
            "address": Kind(1, 0, 0, lambda _: self.relay.say("address")),
            "silence": Kind(1, 1, 10, lambda seconds: self.last("silence", seconds)),
            "outage": Kind(1, 1, 10, lambda seconds: self.last("outage", seconds)),
            "loss": Kind(1, 1, 10, lambda seconds: self.last("loss", seconds)),
            "long-silence": Kind(0.04, 30, 30, lambda seconds: self.last("silence", seconds)),
            "long-outage": Kind(0.04, 30, 30, lambda seconds: self.last("outage", seconds)),
            "stopped-program": Kind(0.4, 0.1, 5, self.stop_program),
            "stopped-worker": Kind(0.4, 0.1, 5, self.stop_worker),
            "server-killed": Kind(1, 0, 0, lambda _: self.replace_server(signal.SIGKILL), continues=True, server=True),
            "server-upgraded": Kind(1, 0, 0, lambda _: self.replace_server(signal.SIGUSR2), continues=True, server=True),
            "daemon-killed": Kind(1, 0, 0, lambda _: self.client.replace(signal.SIGKILL), continues=True, daemon=True),
            "daemon-upgraded": Kind(1, 0, 0, lambda _: self.client.replace(signal.SIGTERM), continues=True, daemon=True),
            "all-killed": Kind(1, 0, 0, lambda _: self.client.replace(signal.SIGKILL, self.break_and_kill_server),
                               continues=True, daemon=True, server=True),
            "all-upgraded": Kind(1, 0, 0, lambda _: self.client.replace(signal.SIGTERM, lambda: self.replace_server(signal.SIGUSR2)),
                                 continues=True, daemon=True, server=True),
        }
        # The program that runs: its process, start, output, and when each line came.
        self.process, self.begun, self.output, self.times = None, 0.0, None, []

    def last(self, word, seconds):
        """A fault of the relay, until its end."""
        self.relay.say(f"{word} {seconds:.2f}")
        time.sleep(seconds)

    def stop_program(self, seconds):
        """Stops the program's processes."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop_worker(self, seconds):
        """Stops the program's worker on the server."""
        rows = json.loads(self.server.tool("ps", "--json"))["workers"]
        workers = [row["pid"] for row in rows if row["state"] == "active"]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)

    def replace_server(self, how):
        """Kills or upgrades the server's control process."""
        self.store.replace(self.server, how)

    def break_and_kill_server(self):
        """Breaks all connections while no process answers those that come next."""
        self.relay.say("reset")
        self.replace_server(signal.SIGKILL)

    def use_daemon(self):
        """Gives the following programs the lease of a daemon in place of the runner's."""
        self.server.release_lease()
        # A later start of the server takes no lease beside the daemon's.
        self.args.lease = "each"
        token = json.loads(self.server.tool("token", "create", "--json"))["token"]
        token = token["token"] if isinstance(token, dict) else token
        self.client = DaemonClient(0, self.args, self.server, self.here, f"{self.folder.name}/0", f"gpus = {self.args.gpus}")
        self.client.join(token)
        self.client.boot()

    def native(self, name, lines):
        """Returns the first lines that the program prints without gpusession."""
        if len(self.natively.get(name, ())) < lines:
            # Up to twice as many, so that most kinds need no run of their own.
            count = 1 << (lines - 1).bit_length()
            result = self.runner.run("native", name, [*self.programs[name].command, str(count)], LIMIT)
            if failure := result.failure():
                raise RuntimeError(f"{name} fails natively: {failure}")
            self.natively[name] = result.lines()[:count]
        return self.natively[name][:lines]

    def start(self, name, tag):
        """Starts a program remotely, with more steps than it will compute."""
        command = [*self.programs[name].command, str(STEPS)]
        if self.client is None:
            self.process, base, self.begun = self.runner.start("remote", tag, command)
        else:
            self.process, base, self.begun = self.runner.start("client", tag, [*LOGIN, *command], self.client.environment())
        self.output = pathlib.Path(f"{base}.out")
        self.times = []

    def lines(self):
        """Returns the whole lines that the program has printed, and keeps their times."""
        lines = self.output.read_text().split("\n")[:-1]
        self.times += [time.monotonic() - self.begun] * (len(lines) - len(self.times))
        return lines

    def wait_for(self, count, limit):
        """Waits for a number of lines; returns False at the program's end, or at the limit."""
        end = time.monotonic() + limit
        while len(self.lines()) < count:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.monotonic() > end:
                return False
            time.sleep(0.003)
        return True

    def pace(self, name):
        """Returns the time from line to line of the undisturbed program."""
        if name not in self.paces:
            first = self.programs[name].lines
            self.start(name, f"{name}-undisturbed")
            if not self.wait_for(max(PACE_LINES, 5 * first), LIMIT):
                raise RuntimeError(f"{name} fails remotely without a fault: {self.said()}")
            kill_group((self.process,))
            self.paces[name] = (self.times[-1] - self.times[first - 1]) / (len(self.times) - first)
        return self.paces[name]

    def said(self):
        """Returns the last line of the program's messages."""
        said = self.output.with_suffix(".err").read_text(errors="replace").strip().splitlines()
        return said[-1][:160] if said else "no message"

    def disturb(self, program, kind, count):
        """Lets faults happen while a program runs; returns their number and seconds."""
        happened, seconds = 0, 0.0
        # The first lines come before the first fault: the program knows its worker by then.
        while happened < count and self.wait_for(len(self.times) + program.lines, LINE_LIMIT):
            time.sleep(self.random.random() * program.step)
            length = self.random.uniform(kind.shortest, kind.longest)
            at = time.monotonic()
            kind.happen(length)
            seconds += time.monotonic() - at
            # The program may have continued meanwhile.
            self.lines()
            happened += 1
        return happened, seconds

    def pair(self, name, program, word, kind):
        """Runs one program under one kind of fault."""
        count = max(1, round(self.args.faults * kind.share))
        tag, step = f"{name}-{word}", self.pace(name)
        if kind.random:
            self.relay.stop()
            self.relay = Relay(self.args, self.here, UNITS, self.args.fault_seed)
        self.start(name, tag)
        why, happened, seconds, lasts = "", 0, 0.0, False
        try:
            if not kind.random:
                happened, seconds = self.disturb(program, kind, count)
            lasts = self.wait_for(len(self.times) + program.lines * (count if kind.random else 1), LIMIT)
            if kind.daemon and lasts:
                self.client.in_use()
            kill_group((self.process,))
            if kind.daemon:
                # The present daemon has to notice the end of a program that an earlier one knew.
                self.client.at_rest()
        except RuntimeError as error:
            why = str(error)
            kill_group((self.process,))
        if kind.random:
            said = self.relay.stop()
            happened = int(said.split()[1]) if said.startswith("faults: ") else 0
            self.relay = Relay(self.args, self.here, 0, 1)
        lines = self.lines()
        native = self.native(name, len(lines))
        if not why and native != lines:
            why = difference(native, lines)
        if not why and not lasts:
            why = f"it stands still or exits after {len(lines)} lines and {happened} faults: {self.said()}"
        elif not why and happened < (1 if kind.random else count):
            why = f"{happened} faults happened, not {count}"
        if not self.server.alive():
            why += "; the server exited"
            self.server.start()
        row = {"name": tag, "kind": word, "program": name, "verdict": "FAILED" if why else "ok", "why": why, "faults": happened, "lines": len(lines),
               "fault_s": round(seconds, 2), "run_s": round(self.times[-1] if lines else 0, 2),
               "lost_s_each": round(self.lost(program, step, 0 if kind.continues else seconds) / max(1, happened), 3)}
        self.rows.append(row)
        progress(f"  {tag:26} {row['verdict']:8} {len(lines):5} lines, {happened:4} faults of {seconds:6.1f} s in all; "
                 f"{row['lost_s_each']:6.3f} s more lost by each  {why}")

    def lost(self, program, step, standing):
        """Returns the time that the faults cost, besides that in which a program has to stand."""
        first = program.lines
        if len(self.times) <= first:
            return 0.0
        return self.times[-1] - self.times[first - 1] - standing - step * (len(self.times) - first)

    def table(self):
        """Returns the results as a table: a row for each kind, two columns for each program."""
        names = list(dict.fromkeys(row["program"] for row in self.rows))
        cells = {(row["kind"], row["program"]): (str(row["faults"]), f"{row['lost_s_each']:.3f} s") if row["verdict"] == "ok" else ("FAILED", "–")
                 for row in self.rows}
        lines = [["fault", *(title for name in names for title in (name, "more lost by each"))], ["---"] * (1 + 2 * len(names))]
        for kind in dict.fromkeys(row["kind"] for row in self.rows):
            lines.append([kind, *(cell for name in names for cell in cells.get((kind, name), ("–", "–")))])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def chosen(self):
        """Returns the kinds that this machine and this configuration can have."""
        # Programs under MPS end with their server.
        mps = any('"mps"' in line for line in self.args.server_config)
        kinds = {word: kind for word, kind in self.kinds.items() if not (mps and kind.server)}
        if why := daemon_client.why_not(self.here):
            progress(f"  no faults of a daemon: {why}")
            kinds = {word: kind for word, kind in kinds.items() if not kind.daemon}
        return kinds

    def run(self):
        """Runs everything, or the parts of --only: `gpt2`, `reset`, `gpt2-reset`."""
        self.server.stop()
        self.relay = Relay(self.args, self.here, 0, 1)
        self.server.popen = self.store.popen
        self.server.start()
        begun = time.monotonic()
        for word, kind in self.chosen().items():
            for name, program in self.programs.items():
                if program.torch and self.args.no_torch or not wanted(self.args, name, word, f"{name}-{word}"):
                    continue
                if self.args.budget and time.monotonic() - begun > self.args.budget:
                    progress(f"  {name}-{word}: not run, since the time budget is used up")
                    continue
                if kind.daemon and self.client is None:
                    self.use_daemon()
                self.pair(name, program, word, kind)
        failed = sum(row["verdict"] != "ok" for row in self.rows)
        print(f"\n{self.table()}\n\nFaults: {len(self.rows) - failed} of {len(self.rows)} as native, "
              f"{sum(row['faults'] for row in self.rows)} faults")
        return {"programs": self.rows, "failed": failed or not self.rows}

    def stop(self):
        """Ends what still runs."""
        if self.process is not None:
            kill_group((self.process,))
        if self.client is not None:
            self.client.stop()
        self.server.stop()
        self.server.popen = subprocess.Popen
        self.store.close()
        if self.relay is not None:
            print(self.relay.stop())
        self.folder.cleanup()
