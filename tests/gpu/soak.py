"""`./run soak`: many clients for a long time, with faults; at the end nothing is left over.

Each client has an identity of its own. Most run one program after the other on a lease of its own;
some have a daemon, and programs of their logins use its lease. Meanwhile connections break, workers
are killed, and servers and daemons are killed, upgraded or stopped. All results have to be right,
and at the end server and daemons are as before: no lease, worker, descriptor, file or memory more,
and every lease and program in the accounting.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import daemon_client
from daemon_client import DaemonClient
from descriptor_store import DescriptorStore
from faults import Relay
from processes import kill_group, progress
from verdicts import difference

# CUDA programs that take little time and print the same each time.
PROGRAMS = ("vectorAdd", "matrixMul", "reduction", "streamsEvents", "threads", "copyBatch", "graphs")
# Longest run of a program, and of the programs that still run at the end, in seconds.
LIMIT, END_LIMIT = 300, 360
# Time in which the server has to be at rest after the last program, in seconds. The lease of a
# killed client ends 60 s after its last renewal, or after a restart of the server.
REST_LIMIT = 150
# Words about a program that got no lease, because no server ran.
UNSERVED = ("that gpuserver runs there", "shows which server does not answer")
# Pauses between two faults, in seconds.
PAUSES = (1, 6)
# Longest pause of a client between two activities, for each client and in seconds: two processors
# start about six programs in a second.
PAUSE = 0.6
STEPS = 60
# One client in ten has a daemon, within these bounds.
DAEMONS, MIN_DAEMONS, MAX_DAEMONS = 10, 2, 8
# Folders whose files a later program uses again.
CACHES = {"cache", "audit"}
# Growth of the server's memory that caches may cause, in MiB.
GROWTH = 24


class PlainClient:
    """A client without a daemon: each program has a lease of its own."""

    def __init__(self, number, args, server, token):
        self.name, self.users, self.args = f"client-{number}", 1, args
        self.home = args.out / "clients" / str(number)
        self.home.mkdir(parents=True)
        command = ["./bin/gpusession", "join", token, "--server", f"127.0.0.1:{args.port}", "--user", "--name", self.name]
        server.call(command, self.environment())

    def environment(self):
        """Returns the environment of the client's user."""
        return dict(os.environ, XDG_CONFIG_HOME=str(self.home))

    def lease_for(self, _):
        """Returns the words before a program that make it use GPUs."""
        return ["./bin/gpusession", "run", "--server", f"127.0.0.1:{self.args.port}", "--allow-clear", "--memory", "256MiB", "--"]

    def excuse(self, _why, _begun):
        """Returns what explains a failure: nothing, since faults have no effect here."""
        return ""


class Soak:
    """A server, its clients, and faults of all."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here = args, server, runner, here
        self.random = random.Random(args.fault_seed)
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-store-")
        self.store = DescriptorStore(f"{self.folder.name}/notify")
        self.relay = None
        self.lock = threading.Lock()
        self.end = 0.0
        self.natively, self.bad = {}, []
        self.done, self.faults = collections.Counter(), collections.Counter()
        self.daemons = []
        # When a fault last killed a worker of a client, by the client's name.
        self.killed = {}
        # End of the latest fault of all connections.
        self.disturbed = 0.0

    # ---- clients

    def join(self, number, daemons):
        """Returns a client with an identity of its own; the first ones have daemons."""
        token = json.loads(self.server.tool("token", "create", "--json"))["token"]
        token = token["token"] if isinstance(token, dict) else token
        if number >= daemons:
            return PlainClient(number, self.args, self.server, token)
        client = DaemonClient(number, self.args, self.server, self.here, f"{self.folder.name}/{number}")
        self.daemons.append(client)
        client.join(token)
        return client

    def client(self, client, user):
        """Runs programs of a user until the end."""
        tag = f"{client.name}-{user}"
        own = random.Random(f"{self.args.fault_seed} {tag}")
        while True:
            # The first activities begin as far apart as all later ones.
            time.sleep(own.random() * max(1, PAUSE * self.args.clients))
            begun = time.monotonic()
            if begun >= self.end:
                return
            what = own.choices(("steps", "program", "two", "killed", "stopped"), (4, 6, 2, 3, 1))[0]
            try:
                why = self.activity(what, client, tag, own)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                why = f"{type(error).__name__}: {error}"
            with self.lock:
                excuse = why and self.excuse(client, why, begun)
                self.done[f"{what}, {excuse}" if excuse else what] += 1
                if excuse:
                    self.log("excused.log", f"{tag}: {what}, {excuse}: {why}")
                if why and not excuse:
                    kept = self.args.out / f"bad-{len(self.bad)}"
                    for end in ("out", "err"):
                        with contextlib.suppress(OSError):
                            shutil.copy(self.args.out / f"{tag}.{end}", f"{kept}.{end}")
                    self.report(f"{self.minute()} {tag}: {what} ({kept.name}): {why}")

    def excuse(self, client, why, begun):
        """Returns what explains the failure of an activity that began then; nothing: it is bad."""
        if self.killed.get(client.name, 0) > begun:
            return "worker killed"
        if self.disturbed > begun and any(words in why for words in UNSERVED):
            return "unserved"
        return client.excuse(why, begun)

    def log(self, name, line):
        """Adds a line to a log in the output folder."""
        with open(self.args.out / name, "a", encoding="utf-8") as log:
            log.write(f"{self.minute()} {line}\n")

    def report(self, why):
        """Notes a failure, and prints it."""
        self.bad.append(why)
        progress(f"  {why}")

    def activity(self, what, client, tag, own):
        """Runs a program, or two in one lease; returns the failure."""
        steps = ["python3", "steps.py", str(own.randrange(3, STEPS))]
        program = [str(self.args.programs / "13" / own.choice(PROGRAMS))]
        command = steps if what in ("steps", "killed", "stopped") else program
        words = ["sh", "-c", '"$@" & "$0" & wait', *program, *program] if what == "two" else command
        out, err = (self.args.out / f"{tag}.{end}" for end in ("out", "err"))
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen([*client.lease_for(own), *words], cwd=self.here, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                       env=dict(client.environment(), GPUSESSION_TRACE="why"), start_new_session=True)
        try:
            if what == "killed":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(own.random() * 3)
                return ""
            if what == "stopped":
                time.sleep(own.random())
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    time.sleep(own.random() * 3)
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"time limit: {' '.join(map(str, words[:3]))}"
        finally:
            kill_group((process,))
        said = (out.read_text(errors="replace") + err.read_text(errors="replace")).strip().splitlines()
        unserved = (*UNSERVED, *daemon_client.INTERRUPTED)
        if refusal := next((line for line in said if any(words in line for words in unserved)), ""):
            return refusal
        if process.returncode:
            return f"{pathlib.Path(command[0]).name}: exit status {process.returncode}: {said[-1][:300] if said else 'no message'}"
        native, lines = self.native(command), self.results(out.read_text(errors="replace"))
        if what == "two":
            native, lines = sorted(2 * native), sorted(lines)
        return "" if native == lines else difference(native, lines)

    @staticmethod
    def results(text):
        """Returns the lines of an output, without the size of the memory."""
        return [line for line in text.splitlines() if not line.startswith("ready ")]

    def native(self, command):
        """Returns the lines that a command prints without gpusession."""
        steps = command[1:] and command[1] == "steps.py"
        key = "steps" if steps else command[0]
        count = int(command[-1]) if steps else 0
        return self.natively[key][:count] if steps else self.natively[key]

    def run_natively(self):
        """Runs each program without gpusession."""
        for key, command in {"steps": ["python3", "steps.py", str(STEPS)],
                             **{path: [path] for path in (str(self.args.programs / "13" / name) for name in PROGRAMS)}}.items():
            result = self.runner.run("native", os.path.basename(key), command, LIMIT)
            if failure := result.failure():
                raise RuntimeError(f"{key} fails natively: {failure}")
            self.natively[key] = self.results(result.out)

    def minute(self):
        """Returns the time since the beginning, for people."""
        return f"{(60 * self.args.minutes - self.end + time.monotonic()) / 60:.2f} min"

    # ---- faults

    def disturb(self):
        """Lets faults happen until the end."""
        kinds = {"reset": 4, "address": 1, "silence": 3, "outage": 3, "server-killed": 1, "server-upgraded": 1, "worker-stopped": 2, "worker-killed": 1}
        kinds |= daemon_client.FAULTS if self.daemons else {}
        while time.monotonic() < self.end:
            time.sleep(self.random.uniform(*PAUSES))
            kind = self.random.choices(list(kinds), list(kinds.values()))[0]
            seconds = self.random.uniform(0.1, 3)
            self.disturbed = float("inf")
            if kind in ("reset", "address"):
                self.relay.say(kind)
            elif kind in ("silence", "outage"):
                self.relay.say(f"{kind} {seconds:.2f}")
                time.sleep(seconds)
            elif kind.startswith("daemon"):
                self.disturb_daemon(kind)
            elif kind.startswith("server"):
                self.store.replace(self.server, signal.SIGKILL if kind == "server-killed" else signal.SIGUSR2)
            else:
                self.disturb_worker(kind, seconds)
            self.disturbed = time.monotonic()
            self.faults[kind] += 1
            self.log("faults.log", f"{kind} {seconds:.1f}")

    def disturb_daemon(self, kind):
        """Lets a fault happen to one of the daemons; its log gets a line of it."""
        daemon = self.random.choice(self.daemons)
        self.log(daemon.log.name, kind)
        if why := daemon.disturb(kind):
            self.report(f"{self.minute()} {why}")

    def disturb_worker(self, kind, seconds):
        """Stops a worker for a time, or kills it."""
        rows = [row for row in json.loads(self.server.tool("ps", "--json"))["workers"] if row["state"] == "active"]
        if not rows:
            return
        row = self.random.choice(rows)
        with contextlib.suppress(ProcessLookupError):
            if kind == "worker-killed":
                with self.lock:
                    self.killed[row["client"]] = time.monotonic()
                os.kill(row["pid"], signal.SIGKILL)
                return
            os.kill(row["pid"], signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(row["pid"], signal.SIGCONT)

    # ---- figures

    def state(self):
        """Returns the figures that have to be at the end as at the beginning."""
        found = {
            "leases": len(json.loads(self.server.tool("leases", "--json"))["leases"]),
            "programs": sum(row["state"] not in ("warm", "starting") for row in json.loads(self.server.tool("ps", "--json"))["workers"]),
            "worker processes": len(self.workers()),
            "leased bytes": sum(row["leased_bytes"] for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]),
            "used bytes": sum(row["used_bytes"] or 0 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]),
            **self.descriptors(),
            "stored descriptors": len(self.store.kept),
            "files": len(self.files()),
        }
        return found

    def descriptors(self):
        """Returns the numbers of the server's descriptors by kind."""
        folder, found = pathlib.Path(f"/proc/{self.server.process.pid}/fd"), collections.Counter()
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found["fd " + os.readlink(path).partition(":[")[0]] += 1
        return found

    def workers(self):
        """Returns the ids of worker processes."""
        found = []
        builds = [build for build in (self.server.build, self.server.other_build) if build is not None]
        programs = {str(build / "gpuserver-worker") for build in builds}
        for path in pathlib.Path("/proc").glob("[0-9]*/exe"):
            with contextlib.suppress(OSError):
                if os.readlink(path).removesuffix(" (deleted)") in programs:
                    found.append(int(path.parent.name))
        return found

    def files(self):
        """Returns the files of server and clients, apart from caches, and of shared memory."""
        lines = dict(line.split(" = ", 1) for line in self.server.configuration.read_text().splitlines() if " = " in line)
        folders = [lines[key].strip('"') for key in ("state_dir", "runtime_dir")] + [str(self.args.out / "clients")]
        folders += [str(daemon.folder / "run") for daemon in self.daemons]
        found = {str(path) for folder in folders for path in pathlib.Path(folder).rglob("*")
                 if not CACHES & set(path.parts)}
        return found | {str(path) for path in pathlib.Path("/dev/shm").glob("gpus*")}

    def resident(self):
        """Returns the server's own memory in MiB; 0 while a fault replaces its process."""
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024
        return 0.0

    @staticmethod
    def more(before, after, key):
        """Returns True if a figure is larger than before."""
        return after.get(key, 0) > before.get(key, 0)

    def rest(self, before):
        """Waits until the server is at rest; returns its figures."""
        end, now = time.monotonic() + REST_LIMIT, {}
        while time.monotonic() < end:
            now = self.state()
            if not any(self.more(before, now, key) for key in {**before, **now}):
                break
            time.sleep(0.5)
        return now

    def accounted(self):
        """Checks that each lease and program of the audit trail has one record, with right sums."""
        # The verbs list a bounded number of lines, so each client is asked for.
        names = [f"client-{number}" for number in range(self.args.clients)]
        events = [row for name in names for row in json.loads(self.server.tool("audit", "--client", name, "--json"))["audit"]]
        records = [row for name in names for row in json.loads(self.server.tool("accounting", "--client", name, "--json"))["records"]]
        usage = json.loads(self.server.tool("stats", "--json"))["usage"]
        leases = collections.Counter(row["lease"] for row in records if row["kind"] == "lease")
        programs = collections.defaultdict(list)
        for row in records:
            if row["kind"] == "process":
                programs[row["lease"]].append(row)
        granted = {row["lease"] for row in events if row["event"] == "lease-granted"}
        started = {row["worker"] for row in events if row["event"] == "program-started"}
        recorded = collections.Counter(row["worker"] for row in records if row["kind"] == "process")
        wrong = []
        # A server that is killed loses events of its last moment that wait for the disk; the next
        # one notes leases again.
        lost = self.faults["server-killed"] * max(1, self.args.clients // 20)
        if granted != set(leases) or max(leases.values(), default=1) > 1:
            wrong.append(f"{len(granted)} leases were granted, {sum(leases.values())} are recorded: {sorted(set(leases) ^ granted)[:3]}")
        unseen = set(recorded) - started
        if started - set(recorded) or len(unseen) > lost or max(recorded.values(), default=1) > 1:
            wrong.append(f"{len(started)} programs started, {sum(recorded.values())} are recorded: {sorted(set(recorded) ^ started)[:3]}")
        for key in ("bytes_to_device", "bytes_from_device", "calls"):
            off = [row["lease"] for row in records if row["kind"] == "lease" and row[key] != sum(program[key] for program in programs[row["lease"]])]
            if off:
                wrong.append(f"{key} of {len(off)} leases is not the sum of their programs: {off[:3]}")
        for key, kind in (("leases", "lease"), ("programs", "process")):
            if sum(row[key] for row in usage) != sum(row["kind"] == kind for row in records):
                wrong.append(f"the statistics count {sum(row[key] for row in usage)} {key}")
        for key in ("bytes_to_device", "bytes_from_device"):
            if sum(row[key] for row in usage) != sum(row[key] for row in records if row["kind"] == "process"):
                wrong.append(f"{key} of the statistics is not the sum of the records")
        self.server.tool("audit", "verify")
        progress(f"  accounting: {len(granted)} leases, {len(started)} programs")
        return wrong

    # ---- the whole

    def run(self):
        """Runs clients and faults for the wanted time, and looks at the rest."""
        self.run_natively()
        self.server.stop()
        self.relay = Relay(self.args, self.here, 0, 1)
        self.server.popen = self.store.popen
        self.server.start()
        self.server.release_lease()
        clients = self.join_all()
        # The first program of each kind fills caches, and the server has been replaced once.
        self.activity("steps", clients[-1], "first", self.random)
        self.store.replace(self.server, signal.SIGUSR2)
        self.activity("two", clients[-1], "first", self.random)
        for daemon in self.daemons:
            self.warm_up(daemon)
        time.sleep(2)
        before, memory, files = self.state(), self.resident(), self.files()
        progress(f"  before: {before}, {memory:.1f} MiB")
        for daemon in self.daemons:
            daemon.boot()
        begun = time.monotonic()
        self.end = begun + 60 * self.args.minutes
        threads = [threading.Thread(target=self.client, args=(client, user), daemon=True) for client in clients for user in range(client.users)]
        threads.append(threading.Thread(target=self.guarded, daemon=True))
        for thread in threads:
            thread.start()
        while time.monotonic() < self.end:
            time.sleep(min(60, max(0.1, self.end - time.monotonic())))
            progress(f"  {(time.monotonic() - begun) / 60:5.1f} min: {sum(self.done.values())} activities, {len(self.bad)} bad, "
                     f"{sum(self.faults.values())} faults, {self.resident():.1f} MiB, {len(self.workers())} workers")
        for thread in threads:
            thread.join(max(0.1, self.end + END_LIMIT - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self.bad.append("a program hangs")
        for daemon in self.daemons:
            self.bad += daemon.leftovers()
            try:
                daemon.shut_down()
            except RuntimeError as error:
                self.bad.append(str(error))
        after = self.rest(before)
        self.bad += [f"{key}: {before.get(key, 0)} before, {after.get(key, 0)} after"
                     for key in {**before, **after} if self.more(before, after, key)]
        if more := sorted(self.files() - files):
            self.bad.append(f"files: {more[:5]}")
        if (rested := self.resident()) > memory + GROWTH:
            self.bad.append(f"the server's memory grew from {memory:.1f} to {rested:.1f} MiB")
        self.bad += self.accounted()
        for why in self.bad:
            print(f"  {why}")
        print(f"\nSoak: {self.args.clients} clients, {self.args.minutes:g} minutes: {sum(self.done.values())} activities {dict(self.done)}; "
              f"{sum(self.faults.values())} faults {dict(self.faults)}; server {memory:.1f} MiB before, {rested:.1f} after; "
              f"{len(self.daemons)} daemons, at most {max((daemon.memory for daemon in self.daemons), default=0):.1f} MiB before, "
              f"{max((daemon.after for daemon in self.daemons), default=0):.1f} after; "
              f"{len(self.bad)} failures")
        return {"activities": self.done, "faults": self.faults, "before": before, "after": after, "failed": self.bad}

    def join_all(self):
        """Returns the clients, some of which have daemons if the machine has a bus."""
        daemons = min(self.args.clients - 1, MAX_DAEMONS, max(MIN_DAEMONS, self.args.clients // DAEMONS))
        if why := daemon_client.why_not(self.here):
            progress(f"  no client has a daemon: {why}")
            daemons = 0
        return [self.join(number, daemons) for number in range(self.args.clients)]

    def warm_up(self, daemon):
        """Runs programs through a daemon and its successor, measures it, and stops it."""
        daemon.boot()
        for what in ("steps", "two"):
            if why := self.activity(what, daemon, "first", self.random) or daemon.disturb("daemon-upgraded"):
                raise RuntimeError(f"{daemon.name}: undisturbed: {why}")
        daemon.measure()
        daemon.shut_down()

    def guarded(self):
        """Runs the faults; notes their failure."""
        try:
            self.disturb()
        except (OSError, RuntimeError, ValueError) as error:
            self.bad.append(f"faults: {error}")

    def stop(self):
        """Ends what still runs."""
        for daemon in self.daemons:
            daemon.stop()
        self.server.stop()
        self.server.popen = subprocess.Popen
        self.store.close()
        if self.relay is not None:
            print(self.relay.stop())
        self.folder.cleanup()
