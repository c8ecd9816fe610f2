"""`./run parking`: an idle program's device memory moves to host memory and back."""

import contextlib
import ctypes
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from descriptor_store import DescriptorStore

LIMIT = 300
# Text of the server's journal before it parks a program.
WARNING = "device memory will be moved"


class Program:
    """A process that is controlled by lines."""

    def __init__(self, command, env, log, cwd, **options):
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, **options
        )
        self.rest = b""

    def line(self, limit=LIMIT):
        """Returns the next line, or None at the time limit."""
        end = time.monotonic() + limit
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            if not ready:
                return None
            got = os.read(self.process.stdout.fileno(), 65536)
            if not got:
                raise RuntimeError(f"a program exited: {self.process.wait()}")
            self.rest += got
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode().strip()

    def expect(self, word, limit=LIMIT):
        """Returns the next line, which has to start with a word."""
        line = self.line(limit)
        if line is None or line.split()[:1] != [word]:
            raise RuntimeError(f"expected {word!r}, got {line!r}")
        return line

    def say(self, line):
        """Sends a line."""
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def end(self):
        """Closes the input, and waits until the process exits."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Parking:
    """All parts. `tool` runs a command of gpuserver and returns its output."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here, self.rows, self.bad = args, server, runner, here, [], []
        self.log = open(args.out / "parking.log", "ab")
        self.programs = []
        self.card = shutil.which("nvidia-smi") is not None
        self.native = shlex.split(args.native_prefix)

    def other_client(self):
        """Creates a second client of the pool, and returns its environment for `gpusession run`."""
        home = self.args.out / "config-2"
        env = {**os.environ, "XDG_CONFIG_HOME": str(home)}
        if not home.exists():
            home.mkdir(parents=True)
            token = json.loads(self.server.tool("token", "create", "--json"))["token"]
            token = token["token"] if isinstance(token, dict) else token
            address = f"127.0.0.1:{self.args.port}"
            self.server.call(["./bin/gpusession", "join", token, "--server", address, "--user", "--name", "other"], env)
        return env

    def start(self, words, native=False, lease=(), other=False):
        """Starts a Python script on the card itself, or with a lease of either client."""
        command = [self.args.python, *words]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if native:
            command = self.native + command
        else:
            prefix = self.server.prefix()
            at = prefix.index("--") if "--" in prefix else len(prefix)
            command = [*prefix[:at], *lease, *prefix[at:], *command]
            env.update(self.other_client() if other else self.server.client_environment())
        program = Program(command, env, self.log, self.here)
        self.programs.append(program)
        return program

    def used(self):
        """Returns the MiB in use on the card."""
        if self.card:
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
            return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0])
        code = (
            "import ctypes as c\nd=c.CDLL('libcuda.so.1');x=c.c_void_p();f=c.c_size_t();t=c.c_size_t();d.cuInit(0)\n"
            "d.cuDevicePrimaryCtxRetain(c.byref(x),0);d.cuCtxSetCurrent(x);d.cuMemGetInfo_v2(c.byref(f),c.byref(t))\n"
            "print((t.value-f.value)>>20)"
        )
        done = subprocess.run([*self.native, self.args.python, "-c", code], capture_output=True, text=True, check=True, timeout=30)
        return int(done.stdout)

    def settled(self):
        """Returns `used` once it is stable, since workers in stock may still be exiting."""
        last, now = None, self.used()
        while now != last:
            time.sleep(0.3)
            last, now = now, self.used()
        return now

    def leases(self):
        """`gpuserver leases`."""
        return json.loads(self.server.tool("leases", "--json"))["leases"]

    def only_lease(self):
        """Returns the only lease."""
        leases = self.leases()
        if len(leases) != 1:
            raise RuntimeError(f"expected one lease, found {leases}")
        return leases[0]["lease"]

    def state(self, lease):
        """Returns state and place of a lease."""
        found = next(row for row in self.leases() if row["lease"] == lease)
        return found["state"], found["position"]

    def park(self, lease):
        """Parks the lease, and returns the duration."""
        begun = time.monotonic()
        self.server.tool("park", lease, "--json")
        return time.monotonic() - begun

    def note(self, name, value, unit):
        """Records one figure."""
        print(f"  {name:52} {value} {unit}", flush=True)
        self.rows.append({"name": name, "value": value, "unit": unit})

    def check(self, what, good):
        """Records one check."""
        print(f"  {what:52} {'ok' if good else 'FAILED'}", flush=True)
        if not good:
            self.bad.append(what)

    def wait_for_no_lease(self, limit=20):
        """Waits until no lease exists."""
        end = time.monotonic() + limit
        while self.leases() and time.monotonic() < end:
            time.sleep(0.1)

    def intact(self, program):
        """Lets a program check its memory; returns the seconds until its first call returned."""
        program.say("check")
        return float(program.expect("intact").split()[1])

    def full_card(self, script, half, other_gib, by_clock=False):
        """Parks a program while another client takes the whole card, and unparks it afterwards."""
        free = self.used()
        first = self.start(script)
        first.expect(half)
        lease = self.only_lease()
        active = self.used()
        self.note("card, program connected and idle", active, "MiB")
        if by_clock:
            self.check("parked by the clock", self.until(lambda: self.state(lease)[0] == "parked", 60))
            self.check("warned before", WARNING in (self.args.out / "server.log").read_text())
        else:
            self.note("time to park", round(self.park(lease), 2), "s")
        self.note("card, program parked", self.settled(), "MiB")
        self.note("card, before any of them", free, "MiB")
        self.check("parked", self.state(lease) == ("parked", 0))
        other = self.start(["idle_program.py", str(other_gib)], other=True)
        other.expect("ready")
        self.check("of another client", len({row["client"] for row in self.leases()}) == 2)
        self.note("card, another client at work", self.used(), "MiB")
        self.check("the other client's memory is good", self.intact(other) >= 0)
        first.say("check")
        time.sleep(3)
        self.check("the first waits, place 1", self.state(lease) == ("returning", 1) and first.line(0.1) is None)
        begun = time.monotonic()
        other.end()
        return first, begun

    def sizes(self, sizes):
        """Compares durations with those of the driver's own calls on a native program."""
        driver = self.driver()
        for gib in sizes:
            native = self.start(["idle_program.py", str(gib)], native=True)
            native.expect("ready", 120)
            out, back = self.driver_alone(driver, native.process.pid)
            self.intact(native)
            native.end()

            remote = self.start(["idle_program.py", str(gib)])
            remote.expect("ready", 120)
            self.wait_for_one()
            before = self.used()
            lease = self.only_lease()
            parked = self.park(lease)
            after = self.settled()
            returned = self.intact(remote)
            remote.end()
            self.wait_for_no_lease()
            self.note(f"{gib} GiB: park, driver's own / leased", f"{out:.2f} / {parked:.2f}", "s")
            self.note(f"{gib} GiB: first call after it, driver's own / leased", f"{back:.2f} / {returned:.2f}", "s")
            self.note(f"{gib} GiB: card before / parked", f"{before} / {after}", "MiB")

    @staticmethod
    def driver_alone(driver, pid):
        """Moves a program's memory by the driver's own calls; returns seconds of both ways."""
        library = ctypes.CDLL(driver)
        # CUcheckpointLockArgs: a limit of 5 s.
        lock = (ctypes.c_uint32 * 16)(5000)
        seconds = []
        for calls in (("Lock", "Checkpoint"), ("Restore", "Unlock")):
            begun = time.monotonic()
            if code := library.cuInit(0):
                raise RuntimeError(f"cuInit: {code}")
            for call in calls:
                if code := getattr(library, f"cuCheckpointProcess{call}")(pid, lock if call == "Lock" else None):
                    raise RuntimeError(f"cuCheckpointProcess{call}: {code}")
            seconds.append(time.monotonic() - begun)
        return seconds

    def wait_for_one(self):
        """Waits until exactly one lease exists."""
        end = time.monotonic() + 20
        while len(self.leases()) != 1 and time.monotonic() < end:
            time.sleep(0.1)

    def driver(self):
        """Returns the driver library that the server loads."""
        return json.loads(self.server.tool("status", "--json"))["server"]["driver"]

    def training(self):
        """Checks that tensors and optimizer state of PyTorch survive parking."""
        before, results = list(self.args.server_config), []
        self.configured([*before, 'warn_after = "4s"', 'park_after = "8s"'])
        for native in (True, False):
            if native:
                program = self.start(["idle_training.py"], native=True)
                program.expect("half")
                program.say("go")
            else:
                program, begun = self.full_card(["idle_training.py"], "half", self.big(), by_clock=True)
            lines = [program.expect("losses"), program.expect("tensors")]
            if not native:
                self.note("rest of the training, the card's return included", round(time.monotonic() - begun, 2), "s")
            program.end()
            results.append(lines)
        self.wait_for_no_lease()
        self.check("losses as natively", results[0][0] == results[1][0])
        self.check("model and optimizer bit for bit as natively", results[0][1] == results[1][1])
        self.configured(before)

    def big(self):
        """Returns the GiB that fill most of the card."""
        total = self.leases()[0]["devices"][0]["limit_bytes"] if self.leases() else 0
        gpus = json.loads(self.server.tool("gpus", "--json"))["gpus"]
        return round((total or gpus[0]["memory_bytes"]) * 0.7 / (1 << 30), 2)

    def until(self, what, limit=20):
        """Waits until a condition holds."""
        end = time.monotonic() + limit
        while not what():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def clocks(self):
        """Checks the idle clock: warning, parking, return, waiting programs, lending."""
        before = list(self.args.server_config)
        self.configured([*before, 'warn_after = "2s"', 'park_after = "4s"', 'lend_after = "2s"'])
        log = self.args.out / "server.log"
        earlier = log.stat().st_size
        program = self.start(["idle_program.py", "0.125"])
        program.expect("ready")
        lease = self.only_lease()
        self.check("parked by the clock", self.until(lambda: self.state(lease)[0] == "parked"))
        self.check("warned before", WARNING.encode() in log.read_bytes()[earlier:])
        self.check("continues", self.intact(program) >= 0)
        begun, seen = time.monotonic(), set()
        while time.monotonic() - begun < 7:
            program.say("spin 1")
            program.expect("spun")
            seen.add(self.state(lease)[0])
            time.sleep(0.2)
        self.check("not parked while it works", seen == {"active"})
        program.end()
        self.wait_for_no_lease()

        first = self.start_shell(f"echo up; read go; exec {self.args.python} idle_program.py 0.125")
        first.expect("up")
        lease = self.only_lease()
        time.sleep(2.5)
        other = self.start(["idle_program.py", str(self.big())])
        other.expect("ready")
        self.check("a lease without programs lends its GPU", self.state(lease)[0] == "lent")
        first.say("go")
        self.check("the lease waits to reacquire it", self.until(lambda: self.state(lease) == ("returning", 1)))
        other.end()
        first.expect("ready")
        self.check("the lease has a GPU again", self.state(lease)[0] == "active")
        first.end()
        self.configured(before)

    def configured(self, lines):
        """Restarts the server with these lines of configuration, without a lease."""
        self.server.stop()
        self.args.server_config[:] = lines
        self.server.write_configuration()
        self.server.start()
        self.server.release_lease()
        self.wait_for_no_lease()

    @contextlib.contextmanager
    def replaceable(self):
        """Runs a server that others replace: a store keeps its programs' descriptors."""
        self.server.stop()
        # The path of a Unix socket has at most 107 bytes.
        with tempfile.TemporaryDirectory(prefix="gpu-store-") as folder:
            store = DescriptorStore(f"{folder}/notify")
            self.server.popen = store.popen
            try:
                self.server.start()
                self.server.release_lease()
                self.wait_for_no_lease()
                yield store
            finally:
                self.server.stop()
                self.server.popen = subprocess.Popen
                store.close()
        self.configured(list(self.args.server_config))

    def replace(self, store, how):
        """Ends the server by a signal, and starts the next one, which takes over its programs."""
        self.server.process.send_signal(how)
        self.server.process.wait()
        self.server.start_server()
        # Its port answers too early: the socket is the previous server's.
        if not store.ready.wait(60):
            raise RuntimeError("the next server did not start")

    def restarts(self):
        """Replaces the server by a handover or a kill: active and parked programs continue."""
        with self.replaceable() as store:
            self.replaced_programs(store)

    def replaced_programs(self, store):
        """Replaces the server under an active and a parked program."""
        for how in (signal.SIGUSR2, signal.SIGKILL):
            program = self.start(["idle_program.py", "0.125"])
            program.expect("ready")
            lease = self.only_lease()
            worker = self.worker()
            for parked in (False, True):
                if parked:
                    self.park(lease)
                begun = time.monotonic()
                self.replace(store, how)
                took = time.monotonic() - begun
                what = f"{'parked' if parked else 'active'}, {how.name}"
                self.check(f"{what}: the same lease and worker", (self.only_lease(), self.worker()) == (lease, worker))
                if parked:
                    self.check(f"{what}: still parked", self.until(lambda: self.state(lease)[0] == "parked"))
                self.note(f"{what}: the next server serves after", round(took, 2), "s")
                self.check(f"{what}: the program's memory is intact", self.intact(program) >= 0)
            program.end()
            self.wait_for_no_lease()

    def calls(self):
        """Returns the number of calls of all programs, as the workers last reported it."""
        return sum(row["calls"] for row in json.loads(self.server.tool("ps", "--json"))["workers"])

    def worker(self):
        """Returns the pid of the only program's worker."""
        rows = json.loads(self.server.tool("ps", "--json"))["workers"]
        return [row["pid"] for row in rows if row["state"] in ("active", "parked")]

    def start_shell(self, script):
        """Starts a shell with a lease of its own."""
        env = {**os.environ, **self.server.client_environment(), "PYTHONUNBUFFERED": "1"}
        program = Program([*self.server.prefix(), "sh", "-c", script], env, self.log, self.here)
        self.programs.append(program)
        return program

    def parts(self):
        """Returns title and function of each part, by the name for `--only`."""
        return {
            "card": ("An idle program is parked while another client uses the whole card", self.whole_card),
            "room": ("A process that fills the card exits after a parked program has asked for it", self.no_room),
            "training": ("PyTorch training, parked in the middle", self.training),
            "restarts": ("The server is replaced", self.restarts),
            "busy": ("One of two programs works", self.one_busy),
            "clock": ("The clock", self.clocks),
            "times": ("Times", self.times),
        }

    def run(self):
        """Runs all parts, or those of `--only`; returns figures and failed checks."""
        self.wait_for_no_lease()
        for name, (title, part) in self.parts().items():
            if (name in self.args.only if self.args.only else name != "training" or not self.args.no_torch):
                print(title, flush=True)
                part()
        return {"figures": self.rows, "failed": self.bad}

    def whole_card(self):
        """See `full_card`."""
        small = 4 if self.card else 0.125
        first, begun = self.full_card(["idle_program.py", str(small)], "ready", self.big())
        first.expect("intact")
        self.note("other client's end to first call's answer", round(time.monotonic() - begun, 2), "s")
        first.end()
        self.wait_for_no_lease()

    def no_room(self):
        """Lets a program return while another process of the host fills the card."""
        small, context = (4, 0.7) if self.card else (0.125, 0)
        first = self.start(["idle_program.py", str(small)])
        first.expect("ready")
        self.park(self.only_lease())
        total = json.loads(self.server.tool("gpus", "--json"))["gpus"][0]["memory_bytes"] >> 20
        other = self.start(["idle_program.py", str((total - self.settled()) / 1024 - small / 2 - context)], native=True)
        other.expect("ready")
        first.say("check")
        time.sleep(3)
        self.check("the first waits for room", first.line(0.1) is None)
        other.end()
        self.check("its memory is intact", (first.line() or "").startswith("intact"))
        first.end()
        self.wait_for_no_lease()

    def one_busy(self):
        """Tries to park a lease with an idle and a busy program: both continue."""
        idle_program = f"{self.args.python} idle_program.py 0.125"
        both = self.start_shell(f"(sleep 9; echo check; sleep 3) | {idle_program} & exec {idle_program}")
        both.expect("ready")
        both.expect("ready")
        lease = self.only_lease()
        before = self.calls()
        both.say("kernel 7")
        self.until(lambda: self.calls() > before)
        said = ""
        try:
            self.park(lease)
        except RuntimeError as error:
            said = str(error)
        self.check("not parked", "uses its GPU now" in said and self.state(lease)[0] == "active")
        # The idle one's memory may have been in host memory meanwhile.
        words = sorted((both.line() or "nothing").split()[0] for _ in range(2))
        self.check("both continue with their memory", words == ["intact", "kernel"] and self.intact(both) >= 0)
        both.end()
        self.wait_for_no_lease()

    def times(self):
        """Measures the sizes that fit on the card."""
        total = json.loads(self.server.tool("gpus", "--json"))["gpus"][0]["memory_bytes"] / (1 << 30)
        wanted = [1, 16, 64] if self.card else [0.0625]
        self.sizes([gib for gib in wanted if gib < total * 0.9])

    def stop(self):
        """Kills the processes that still run."""
        for program in self.programs:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()
