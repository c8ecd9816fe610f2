"""`./run mps`: programs share the card by NVIDIA's MPS.

Measures their shares of multiprocessors and memory, the reach of a fault, the effect of a killed
daemon, and the gain of two programs over time-slicing."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import parking

# Number of blocks that fills any card, and one that fills a fifth of a large card.
MANY, FEW = 4096, 26


class Native:
    """An MPS daemon without gpusession, and its programs."""

    def __init__(self, mps):
        folder = mps.args.out / "mps-driver"
        folder.mkdir(mode=0o700, exist_ok=True)
        self.mps = mps
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}

    def __enter__(self):
        log = self.mps.log
        self.daemon = subprocess.Popen(["nvidia-cuda-mps-control", "-f"], env=self.env, stdout=log, stderr=log)
        try:
            self.mps.check("the daemon answers", self.mps.until(lambda: self.say("get_default_active_thread_percentage")))
        except BaseException:
            self.daemon.kill()
            raise
        return self

    def __exit__(self, *_):
        try:
            self.say("quit -t 2")
            self.daemon.wait(30)
        finally:
            self.daemon.kill()

    def program(self):
        """Starts a program, and waits until it is ready."""
        mps = self.mps
        one = parking.Program([*mps.native, mps.args.python, "mps_program.py"], self.env, mps.log, mps.here)
        mps.programs.append(one)
        one.expect("ready")
        return one

    def say(self, line):
        """Sends a command to the daemon, and returns the words of its answer."""
        asked = subprocess.run(["nvidia-cuda-mps-control"], input=line + "\n", env=self.env, capture_output=True, text=True, timeout=30)
        return asked.stdout.split()


class Mps(parking.Parking):
    """All parts."""

    def __init__(self, args, server, runner, here):
        super().__init__(args, server, runner, here)
        self.lines = list(args.server_config)
        # Each program has its own.
        args.lease = "each"

    def configure(self, *lines):
        """Restarts the server with further lines of configuration."""
        self.server.stop()
        self.args.server_config[:] = [*self.lines, *lines]
        self.server.write_configuration()
        self.server.start()

    def domains(self):
        """`gpuserver mps`."""
        return json.loads(self.server.tool("mps", "--json"))["domains"]

    def worker_of(self, lease):
        """Returns pid and environment of the worker of a lease's only program."""
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        pid = next((row["pid"] for row in workers if row["lease"] == lease and row["state"] == "active"), None)
        if pid is None:
            raise RuntimeError(f"no program of lease {lease} is served: {workers}")
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return pid, dict(entry.split("=", 1) for entry in entries if entry.startswith("CUDA_MPS"))

    def program(self, *lease, other=False):
        """Starts a program with a lease of its own; returns it, and its line about the card."""
        program = self.start(["mps_program.py"], lease=lease, other=other)
        words = program.expect("ready").split()
        return program, int(words[1]), int(words[2])

    def ask(self, program, line, word):
        """Sends one line, and returns the words of the answer."""
        program.say(line)
        return program.expect(word).split()[1:]

    def rates(self, programs, blocks, seconds=4):
        """Returns the launches per second of several programs at the same time."""
        for program in programs:
            program.say(f"busy {seconds} {blocks}")
        return [float(program.expect("did").split()[1]) for program in programs]

    def limits(self):
        """Checks 25 % of multiprocessors and memory."""
        whole, all_sms, _ = self.program()
        full = self.rates([whole], MANY)[0]
        whole.end()
        self.wait_for_no_lease()
        begun = time.monotonic()
        part, sms, mib = self.program("--sm-percent", "25", "--memory", "25%")
        self.note("start of a program, with lease and daemon", round(time.monotonic() - begun, 2), "s")
        quarter = self.rates([part], MANY)[0]
        self.note("multiprocessors seen, whole / 25 %", f"{all_sms} / {sms}", "")
        self.note("throughput, whole / 25 %", f"{full} / {quarter}", f"launches/s, {quarter / full:.3f}")
        self.check("a quarter is seen", abs(sms / all_sms - 0.25) < 0.03)
        self.check("a quarter is measured", abs(quarter / full - 0.25) < 0.04)
        lease = self.only_lease()
        limit = self.leases()[0]["devices"][0]["limit_bytes"] >> 20
        self.check("memory seen is the lease's", mib == limit)
        self.check("half of it can be allocated", self.ask(part, f"alloc {limit // 2}", "alloc") == ["0"])
        self.check("the same amount again cannot: out of memory", self.ask(part, f"alloc {limit // 2}", "alloc") == ["2"])
        self.check("the program continues", self.ask(part, "check", "state") == ["0"])
        _, variables = self.worker_of(lease)
        self.note("variables of the worker", {k[9:]: v for k, v in variables.items() if "PIPE" not in k}, "")
        env = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
        # A daemon serves one user.
        user = self.server.starter.as_worker() if self.server.starter else {}
        native = parking.Program([*self.native, self.args.python, "mps_program.py"], env, self.log, self.here, **user)
        self.programs.append(native)
        words = native.expect("ready").split()
        self.note("the driver's own answer with these", f"{words[1]} multiprocessors, {words[2]} MiB", "")
        self.check("the driver alone refuses more too", self.ask(native, f"alloc {limit + 64}", "alloc") == ["2"])
        native.end()
        return part, sms

    def killed_daemon(self, part, sms):
        """Kills the control daemon: programs continue or fail; limits hold for later programs."""
        old = self.domains()[0]
        os.kill(old["daemon_pid"], signal.SIGKILL)
        begun = time.monotonic()
        self.check("a new daemon runs", self.until(lambda: self.domains()[0]["daemon_pid"] not in (None, old["daemon_pid"])))
        self.note("time until it runs", round(time.monotonic() - begun, 2), "s")
        code = self.ask(part, "check", "state")[0]
        self.note("program that ran meanwhile", "continues" if code == "0" else f"error {code}", "")
        again, seen, mib = self.program("--sm-percent", "25", "--memory", "25%")
        self.check("limits hold for a new program", seen == sms)
        self.check("the limit of memory, too", self.ask(again, f"alloc {mib + 64}", "alloc") == ["2"])
        self.note("servers", [(s["pid"], s["state"], s["clients"]) for s in self.domains()[0]["servers"]], "")
        part.end()
        again.end()
        self.wait_for_no_lease()
        alive = [s["pid"] for s in old["servers"] if os.path.exists(f"/proc/{s['pid']}")]
        self.check("the old server ends after its last program", self.until(lambda: not any(os.path.exists(f"/proc/{p}") for p in alive)))

    def died(self, program, limit=15):
        """Returns seconds and error when a program's calls fail or it exits; None: it continues."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit:
            try:
                code = self.ask(program, "check", "state")[0]
            except (RuntimeError, OSError) as error:
                return time.monotonic() - begun, str(error)
            if code != "0":
                return time.monotonic() - begun, f"error {code}"
            time.sleep(0.1)
        return None

    def fault(self, other):
        """Lets a program fault while another one runs, of the same client or of another client."""
        victim, _, _ = self.program("--memory", "25%")
        culprit, _, _ = self.program("--memory", "25%", other=other)
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        pids = [(row["pid"], row["client"]) for row in workers if row["state"] == "active"]
        before = len(self.domains())
        name = "two domains" if other else "one domain"
        self.note(f"{name}: domains", before, "")
        begun = time.monotonic()
        code = self.ask(culprit, "fault", "fault")[0]
        self.note(f"{name}: the culprit gets an error", f"error {code}", "")
        if not other:
            states = [self.died(victim, 8)]
        fresh, _, _ = self.program("--memory", "20%", other=other)
        self.check(f"{name}: service resumes", self.ask(fresh, "check", "state") == ["0"])
        self.note(f"{name}: from the fault to the next program", round(time.monotonic() - begun, 1), "s")
        reached = self.died(victim, 8) if other else states[0]
        self.note(f"{name}: the other program", "continues" if reached is None else f"{reached[1]} after {reached[0]:.1f} s", "")
        self.check(f"{name}: as documented", (reached is None) == other)
        self.until(lambda: any(d["faults"] for d in self.domains()), 5)
        faults = [f for d in self.domains() for f in d["faults"]]
        self.note(f"{name}: faults shown", faults, "")
        self.check(f"{name}: the fault is shown", bool(faults))
        self.note(f"{name}: the programs' workers", pids, "")
        for program in (fresh, culprit, victim):
            self.finish(program)
        self.wait_for_no_lease()

    def finish(self, program):
        """Ends a program that may have exited."""
        try:
            program.end()
        except OSError:
            program.process.kill()
            program.process.wait()

    def killed_client(self, kernels):
        """Kills a client during short or long kernels; its domain's other client continues."""
        other, _, _ = self.program("--memory", "25%")
        leases = {row["lease"] for row in self.leases()}
        beside, _ = self.worker_of(next(iter(leases)))
        victim, _, _ = self.program("--memory", "25%")
        lease = next(row["lease"] for row in self.leases() if row["lease"] not in leases)
        pid, _ = self.worker_of(lease)
        other.say(f"busy 6 {MANY}")
        victim.say("long" if kernels == "long" else f"busy 60 {MANY}")
        time.sleep(2)
        used = self.used()
        run = victim.process.pid
        for child in pathlib.Path(f"/proc/{run}/task/{run}/children").read_text().split() or [run]:
            os.kill(int(child), signal.SIGKILL)
        begun = time.monotonic()
        self.check(f"{kernels} kernels: its worker exits within 2 s", self.until(lambda: not os.path.exists(f"/proc/{pid}"), 2))
        self.note("time until it exits", round(time.monotonic() - begun, 2), "s")
        self.note("card before / after", f"{used} / {self.used()}", "MiB")
        self.check("the other one's work continues", other.expect("did").split()[2] == "0")
        faults = [f for d in self.domains() for f in d["faults"]]
        self.check("no fault is shown", not faults)
        if faults:
            self.note("workers, the killed program's first", [pid, beside], "")
            self.note("faults", faults, "")
        other.end()
        victim.process.wait()
        self.wait_for_no_lease(90)

    def throughput(self, sharing, two_clients=False):
        """Measures one program alone and two together, of one client or of two.

    Uses kernels that fill the card, and kernels that do not."""
        first, _, _ = self.program("--memory", "25%")
        second, _, _ = self.program("--memory", "25%", other=two_clients)
        row = {}
        for name, blocks in (("large", MANY), ("small", FEW)):
            alone = self.rates([first], blocks)[0]
            both = self.rates([first, second], blocks)
            row[name] = (alone, *both)
            self.note(f"{sharing}, {name} kernels: one / two of them", f"{alone} / {both}", f"launches/s, {sum(both) / alone:.2f} x")
        first.end()
        second.end()
        self.wait_for_no_lease()
        return row

    def train(self, count, name, lease=None, two_clients=False, meanwhile=lambda: None):
        """Trains GPT-2 in several programs at once; returns each one's milliseconds per step.

        Without a lease they run on the card itself; else all belong to one client, or every second
        one to another client.
        """
        command = [self.args.python, "train_gpt2.py", "--steps", "20"]
        folder = self.args.out / f"rendezvous-{name}-{count}"
        folder.mkdir(exist_ok=True)
        who, side = [{}], "native"
        if lease:
            prefix = self.server.prefix()
            at = prefix.index("--")
            command = [*prefix[:at], *lease, *prefix[at:], *command]
            who, side = [self.server.client_environment()], "client"
            if two_clients:
                who.append(self.other_client())
        env = {"RENDEZVOUS": f"{folder}:{count}", "HF_HUB_OFFLINE": "1"}
        tag = f"gpt2-{name}-{count}"
        running = [self.runner.start(side, tag, command, {**who[number % len(who)], **env}) for number in range(count)]
        if two_clients:
            self.check("they are two clients", self.until(lambda: len({row["client"] for row in self.leases()}) == 2, 60))
        meanwhile()
        results = [self.runner.finish(one, 300) for one in running]
        if lease:
            self.wait_for_no_lease()
        return [value[0] for r in results for name, value in r.measurements().items() if name.endswith("_step")]

    def training(self, sharing, two_clients=False):
        """Measures one training, and two at the same time."""
        name = sharing.replace(", ", "-").replace(" ", "-")
        one, two = (self.train(count, name, ("--memory", "40%"), two_clients and count == 2) for count in (1, 2))
        if (len(one), len(two)) == (1, 2):
            gain = sum(one[0] / step for step in two)
            self.note(f"{sharing}, GPT-2 training step: one / two of them", f"{one[0]:.1f} / {two}", f"ms, {gain:.2f} x")
        else:
            self.check(f"{sharing}: GPT-2 training", False)

    def run(self):
        """Runs all parts; returns True if all checks passed."""
        if not self.card or not self.has_mps():
            print("  (MPS works on no card of this machine: only the programs themselves are tried, time-sliced)", flush=True)
            program, sms, _ = self.program("--memory", "25%")
            self.check("a program runs", sms > 0 and self.rates([program], 1, 0.01)[0] > 0)
            self.check("an invalid address is a fault", self.ask(program, "fault", "fault") != ["0"])
            program.end()
            return {"figures": self.rows, "failed": self.bad}
        parts = {
            "limits": self.part_limits,
            "kill": self.part_kill,
            "driver": self.part_driver,
            "contexts": self.part_contexts,
            "faults": self.part_faults,
            "throughput": self.part_throughput,
            "clients": self.part_clients,
            "isolation": self.part_isolation,
        }
        for name, part in parts.items():
            if self.args.only and name not in self.args.only:
                continue
            print(name, flush=True)
            try:
                part()
            except (RuntimeError, OSError, StopIteration, IndexError) as error:
                self.check(f"{name}: {error!r}", False)
                self.stop()
        return {"figures": self.rows, "failed": self.bad}

    def has_mps(self):
        """Returns True if NVIDIA's program exists, or the configuration names it."""
        return bool(shutil.which("nvidia-cuda-mps-control")) or any("mps_control" in line for line in self.lines)

    def part_limits(self):
        """See `limits` and `killed_daemon`."""
        self.configure('sharing = "mps"')
        self.killed_daemon(*self.limits())

    def part_kill(self):
        """See `killed_client`; rare failures show with `--repeat`."""
        self.configure('sharing = "mps"')
        for _ in range(self.args.repeat):
            self.killed_client("short")
            self.killed_client("long")

    def part_driver(self):
        """Shows the effect of a kill on another program of the same MPS server, without gpusession.

        The results justify how the supervisor ends a worker under MPS.
        """
        def ends(daemon, wait):
            """Returns True if a program fails when another one is killed.

            Before the kill, MPS terminates that program's work, and `wait` seconds pass; None: no
            termination.
            """
            other, victim = daemon.program(), daemon.program()
            other.say(f"busy 3 {MANY}")
            victim.say(f"busy 60 {MANY}")
            time.sleep(1)
            if wait is not None:
                answers = [daemon.say(f"terminate_client {s} {victim.process.pid}") for s in daemon.say("get_server_list")]
                self.check("MPS ends its work", answers == [["0"]])
                time.sleep(wait)
            victim.process.kill()
            code = other.expect("did").split()[2]
            other.end()
            return code != "0"

        with Native(self) as daemon:
            for name, wait in (("killed", None), ("MPS notified, killed at once", 0), ("MPS notified, killed 0.5 s later", 0.5)):
                reached = sum(ends(daemon, wait) for _ in range(self.args.repeat))
                self.note(f"{name}: the other one exited too", f"{reached} of {self.args.repeat}", "")
            self.check("after 0.5 s no other program ends", not reached)

    def part_contexts(self):
        """Counts the contexts that an MPS server accepts: natively, and with the server's limit."""
        with Native(self) as daemon:
            native = daemon.program()
            native.say("contexts 100")
            made, code = native.expect("contexts").split()[1:]
            self.note("the driver's own limit: contexts besides the first", made, f"then error {code}")
            self.check("it is at least the server's", int(made) >= 47)
            native.end()
        self.configure('sharing = "mps"')
        program, _, _ = self.program("--memory", "60%")
        self.check("a program creates 47 more", self.ask(program, "contexts 47", "contexts") == ["47", "0"])
        env = {**os.environ, **self.server.client_environment(), "GPUSESSION_TRACE": "why"}
        prefix = self.server.prefix()
        command = [*prefix[:-1], "--memory", "25%", *prefix[-1:], self.args.python, "mps_program.py"]

        def refused():
            """Returns True once the first worker's report, sent each second, blocks a program."""
            one = subprocess.run(command, env=env, cwd=self.here, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
            said = "one MPS server serves" in one.stderr and not one.stdout.startswith("ready")
            if said:
                self.note("one more program", one.stdout.strip(), one.stderr.strip())
            return said

        self.check("one more is refused with the reason", self.until(refused))
        self.check("the first program continues", self.ask(program, "check", "state") == ["0"])
        program.end()
        self.wait_for_no_lease()

    def part_faults(self):
        """See `fault`."""
        self.configure('sharing = "mps"')
        self.fault(other=True)
        self.fault(other=False)

    def table(self, *rows):
        """Measures throughput and training for each (name, two clients, configuration)."""
        for name, two_clients, lines in rows:
            self.configure(*lines)
            self.throughput(name, two_clients)
            if not self.args.no_torch:
                self.training(name, two_clients)

    def part_throughput(self):
        """Measures two programs of one client."""
        self.table(("time-slice", False, ['sharing = "time-slice"']), ("mps", False, ['sharing = "mps"']))

    def part_clients(self):
        """Measures two clients, with a domain each or a common one, and the reach of a fault."""
        shared = ['sharing = "mps"', 'mps_domain = "server"']
        self.table(
            ("time-slice, two clients", True, ['sharing = "time-slice"']),
            ("mps, two clients", True, ['sharing = "mps"']),
            ("mps, two clients in one domain", True, shared),
        )
        first, _, _ = self.program("--memory", "25%")
        second, _, _ = self.program("--memory", "25%", other=True)
        self.check("one domain has both", [d["client"] for d in self.domains()] == ["*"])
        first.say("fault")
        self.check("the fault is the program's own", first.expect("fault").split()[1:] != ["0"])
        self.check("it also ends the other client's program", self.died(second))
        self.stop()
        self.wait_for_no_lease(90)

    def part_isolation(self):
        """Checks that workers give up rights that they do not need."""
        self.configure('sharing = "mps"', 'isolation = "try"')
        program, sms, _ = self.program("--sm-percent", "50")
        self.check("a program runs", float(self.rates([program], FEW, 1)[0]) > 0)
        workers = json.loads(self.server.tool("ps", "--json"))["workers"]
        worker = next(row for row in workers if row["state"] == "active")
        self.note("isolation", worker["isolation"], f"{sms} multiprocessors")
        status = pathlib.Path(f"/proc/{worker['pid']}/status").read_text()
        filtered = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)["Seccomp"] == "2"
        self.check("its system calls are filtered, if isolation is complete", filtered or worker["isolation"] != "full")
        program.end()
        self.wait_for_no_lease()
