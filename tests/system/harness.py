"""Building blocks of scenarios: hosts, waiting, and checks that are counted and printed."""
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
_loader = importlib.machinery.SourceFileLoader("lab", str(HERE / "lab"))
_spec = importlib.util.spec_from_loader("lab", _loader)
lab = importlib.util.module_from_spec(_spec)
_loader.exec_module(lab)

# Packages that gpusession's packages and the scenarios need, besides the lab's own.
EXTRA = "cron,at,csh,tcsh,fish,podman,crun,uidmap,faketime,openssl"
CLIENT_PACKAGES = ("gpusession", "gpusession-libs", "libpam-gpusession")
SIM = "/usr/lib/x86_64-linux-gnu/gpusession/sim/libcuda.so.1"


# Measures logins, in milliseconds: `HOW COUNT [LIMIT]`. With a limit, stops at the first login
# within it. `module` uses a PAM stack that contains only pam_gpusession; `first` logs in a user
# whose systemd does not run yet.
LOGINS = r"""
import ctypes, os, subprocess, sys, time
def module():
    pam = ctypes.CDLL("libpam.so.0")
    talk = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 19)
    class Conversation(ctypes.Structure):
        _fields_ = [("talk", type(talk)), ("data", ctypes.c_void_p)]
    conversation, handle = Conversation(talk, None), ctypes.c_void_p()
    assert not pam.pam_start(b"only-gpusession", b"alice", ctypes.byref(conversation), ctypes.byref(handle))
    begin = time.monotonic()
    assert not pam.pam_open_session(handle, 0)
    took = time.monotonic() - begin
    assert len(os.listdir("/proc/self/task")) == 1, "the module has started a thread"
    pam.pam_close_session(handle, 0)
    pam.pam_end(handle, 0)
    return took
def login(*command):
    begin = time.monotonic()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin
def first():
    subprocess.run("loginctl terminate-user alice; systemctl stop user@1000.service", shell=True, stderr=subprocess.DEVNULL)
    return su()
def su():
    return login("su", "-l", "alice", "-c", "true")
def ssh():
    return login("ssh", "alice@client", "true")
how, count, limit = globals()[sys.argv[1]], int(sys.argv[2]), float((sys.argv + ["-1"])[3])
for _ in range(count):
    took = how() * 1000
    print(f"{took:.1f}")
    if took <= limit: break
"""


class Failed(Exception):
    """A failed check, with the observed output."""


class Result:
    def __init__(self, command, code, out, seconds):
        self.command, self.code, self.out, self.seconds = command, code, out.strip(), seconds

    def __str__(self):
        return f"$ {self.command}\n{self.out}\nexit status {self.code}"


class Host:
    """A host of the lab."""

    def __init__(self, name):
        self.name = name

    def lab(self, *arguments):
        """Runs a command of the lab, such as `cut` or `reboot`."""
        done = subprocess.run([HERE / "lab", arguments[0], self.name, *arguments[1:]], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"lab {' '.join(arguments)}: {done.stderr}")

    def start_without_waiting(self):
        """Boots a stopped host until D-Bus and ssh run; the full boot may depend on others."""
        h = lab.host(self.name)
        lab.start(h)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if lab.leader(h) and not self.run("systemctl is-active dbus ssh").code:
                return
            time.sleep(0.1)
        raise Failed(f"{self.name} did not boot within 30 s")

    def run(self, command, user=None, timeout=60, stdin=None):
        """Runs a shell command in its own unit, as root or (through `su -l`) as a user."""
        inner = ["su", "-l", user, "-c", command] if user else ["sh", "-c", command]
        full = [*lab.enter(lab.host(self.name)), "systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--service-type=exec",
                "-E", "LANG=C.UTF-8", "-E", "HOME=/root", "-p", "WorkingDirectory=/root", "-p", f"RuntimeMaxSec={timeout}", "--", *inner]
        begin = time.monotonic()
        done = subprocess.run(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, input=stdin, text=True,
                              errors="replace", **({} if stdin else {"stdin": subprocess.DEVNULL}), timeout=timeout + 30)
        return Result(f"[{user or 'root'}@{self.name}] {command}", done.returncode, done.stdout, time.monotonic() - begin)

    def ok(self, command, **options):
        """Runs a command that has to succeed, and returns its output."""
        result = self.run(command, **options)
        if result.code:
            raise Failed(str(result))
        return result.out

    def fails(self, command, **options):
        """Runs a command that has to fail, and returns its output."""
        result = self.run(command, **options)
        if not result.code:
            raise Failed(f"{result}\nthe command should have failed")
        return result.out

    def start(self, unit, command, user=None):
        """Starts a command in the background, as a unit whose output goes to `/run/UNIT.out`."""
        self.ok(f"rm -f /run/{unit}.out; systemctl stop {unit} 2>/dev/null || true")
        inner = f"exec su -l {user} -c {shlex.quote(command)}" if user else command
        subprocess.run([*lab.enter(lab.host(self.name)), "systemd-run", "--quiet", "--collect", f"--unit={unit}",
                        "-p", "StandardOutput=file:/run/" + unit + ".out", "-p", "StandardError=file:/run/" + unit + ".out",
                        "--", "sh", "-c", inner], check=True, capture_output=True)

    def until(self, command, seconds, what=None, **options):
        """Repeats a command until it succeeds, and returns its output."""
        begin = time.monotonic()
        while True:
            result = self.run(command, **options)
            took = time.monotonic() - begin
            if not result.code:
                return result.out
            if took > seconds:
                raise Failed(f"not within {seconds} s: {what or ''}\n{result}")
            time.sleep(0.1)

    def write(self, path, text, mode="644"):
        self.ok(f"mkdir -p $(dirname {path}) && cat >{path} && chmod {mode} {path}", stdin=text)

    def push(self, files, folder):
        done = subprocess.run([HERE / "lab", "push", self.name, *map(str, files), folder], capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stderr)

    def network(self, *command, stdin=None):
        """Runs a command of this machine in the host's network."""
        inside = ["nsenter", "-t", str(lab.leader(lab.host(self.name))), "-n", *command]
        subprocess.run(inside, input=stdin, text=True, check=True)

    @contextlib.contextmanager
    def filters(self, **chains):
        """Filters packets of this host; `chains` has a rule for each hook."""
        parts = " ".join(f"chain {hook} {{ type filter hook {hook} priority 0; {rule}; }};" for hook, rule in chains.items())
        self.network("nft", "-f", "-", stdin=f"table inet filters {{ {parts} }}")
        try:
            yield
        finally:
            self.network("nft", "delete table inet filters")

    def refuses(self, port):
        """Rejects connections to a port, as a firewall would."""
        return self.filters(input=f"tcp dport {port} reject with tcp reset")

    def loses(self, percent):
        """Loses packets in both directions."""
        rule = f"numgen random mod 100 < {percent} drop"
        return self.filters(input=rule, output=rule)

    @contextlib.contextmanager
    def suspended(self):
        """Stops all processes and the network, as the suspend of a virtual machine does."""
        files = [Path(group) / "cgroup.freeze" for group in lab.cgroups(lab.host(self.name))]
        freeze = next(file for file in files if file.exists())
        self.lab("cut", "--silent")
        freeze.write_text("1")
        try:
            yield
        finally:
            freeze.write_text("0")
            self.lab("heal")

    def logins(self, how, count, limit=-1):
        """Returns the milliseconds of `count` logins; stops at the first one within a limit."""
        if self.run("test -e /root/logins.py").code:
            self.write("/root/logins.py", LOGINS)
            self.write("/etc/pam.d/only-gpusession", "session optional pam_gpusession.so\nsession required pam_permit.so\n")
        return [float(word) for word in self.ok(f"python3 /root/logins.py {how} {count} {limit}", timeout=120).split()]

    def install(self, debs):
        """Installs packages from files; their dependencies are in the image."""
        self.push(debs, "/root/debs")
        names = " ".join(f"/root/debs/{Path(d).name}" for d in debs)
        return self.ok(f"DEBIAN_FRONTEND=noninteractive dpkg -i {names} 2>&1", timeout=120)


class Site:
    """A client and two servers with simulated GPUs; the scenario `site` installs and joins them."""

    def __init__(self, debs, programs, packaging):
        self.debs, self.programs, self.packaging = debs, programs, packaging
        self.client, self.servers = Host("client"), [Host("gpu1"), Host("gpu2")]
        self.ready = False

    def deb(self, name, folder=None):
        found = sorted((folder or self.debs).glob(f"{name}_*.deb"))
        if len(found) != 1:
            raise Failed(f"{folder or self.debs} has {len(found)} packages {name}: make deb")
        return found[0]

    def boot(self, *names, suite="bookworm"):
        """Boots those of the hosts that are not up yet."""
        environment = dict(os.environ, LAB_SUITE=suite, LAB_EXTRA=EXTRA)
        done = subprocess.run([HERE / "lab", "up", *names], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stderr)

    def sim_library(self):
        """Extracts the simulated driver from its package, as another vendor's libcuda.so.1."""
        folder = ROOT / "target/system" / lab.ID
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "libcuda.so.1", "wb") as out:
            tar = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", self.deb("gpusession-libs")], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-xO", "." + SIM], stdin=tar.stdout, stdout=out, check=True)
            tar.wait()
        return folder / "libcuda.so.1"

    def packages(self, kind, folder, *arguments):
        """Builds further packages (`deb` or `rpm`) on the first call, and returns their files."""
        out = ROOT / "target/system" / folder
        # Groups of scenarios that run side by side need the same packages.
        with lab.Lock(str(ROOT / "target/system/lock")):
            if not list(out.glob(f"*.{kind}")):
                done = subprocess.run([ROOT / "packaging/build", kind, "--fast", "--out", out, *self.packaging, *arguments],
                                      capture_output=True, text=True)
                if done.returncode:
                    raise Failed(done.stdout + done.stderr)
        return sorted(out.glob(f"*.{kind}"))

    def install_server(self, host, devices=2):
        host.write("/etc/systemd/system/gpuserver.service.d/simulated.conf",
                   f"[Service]\nEnvironment=SIMGPU_DEVICES={devices} SIMGPU_ALL_USERS=1\n")
        host.install([self.deb("gpuserver"), self.deb("gpusession-libs")])
        host.write("/etc/gpusession/gpuserver.d/simulated.toml", f'driver = "{SIM}"\nlock_dir = "/run/lock/gpusession"\n[limits]\ngpus = {2 * devices}\n')

    def install_client(self, host):
        host.install([self.deb(p) for p in CLIENT_PACKAGES])
        programs = [self.programs / p for p in ("vectorAdd", "deviceQuery", "killVictim", "memFree", "longRun")]
        host.push([*programs, ROOT / "tests/gpu/idle_program.py"], "/usr/local/bin")

    def down(self):
        self.ready = False
        subprocess.run([HERE / "lab", "down"], capture_output=True)

    def explain(self, out):
        """Writes the last journal entries of the services, for the diagnosis of a failure."""
        for host in [self.client, *self.servers]:
            with contextlib.suppress(BaseException):
                text = host.run("journalctl -b -n 15 --no-pager -o short-precise -t gpusessiond -t gpuserver -t gpuserver-signer -t gpuserver-starter; systemctl --failed --no-legend").out
                out.write(f"    -- journal of {host.name}\n" + "".join(f"    {line}\n" for line in text.splitlines()))


# Begins the line of a failed check, and the line that follows a scenario's checks; the last line of
# a run.
FAIL = "FAIL"
DONE = "done"
SUMMARY = "system: {} passed, {} failed, {} s"


class Report:
    """Counts checks, and prints a line for each."""

    def __init__(self):
        self.passed = self.failed = 0
        self.scenario, self.start = "", time.monotonic()

    @contextlib.contextmanager
    def of(self, scenario):
        """Attributes checks to a scenario, and prints its duration at its end."""
        self.scenario, begin = scenario, time.monotonic()
        yield
        print(f"{DONE} {time.monotonic() - begin:6.1f} s  {scenario}", flush=True)

    @contextlib.contextmanager
    def check(self, text):
        """Counts and prints the result of a block, which raises Failed if `text` does not hold."""
        begin = time.monotonic()
        note = []
        try:
            yield note.append
        except Exception as error:  # also errors in a check's own code
            self.failed += 1
            self._line(FAIL, begin, text)
            text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            print("".join(f"    {line}\n" for line in text.splitlines()), end="", flush=True)
        else:
            self.passed += 1
            self._line("ok", begin, text + (f": {'; '.join(note)}" if note else ""))

    def _line(self, verdict, begin, text):
        print(f"{verdict:4} {time.monotonic() - begin:6.1f} s  {self.scenario}: {text}", flush=True)

    def broken(self, error):
        self.failed += 1
        print(f"{FAIL}           {self.scenario}: setup failed, or aborted outside of a check: {type(error).__name__}: {error}", flush=True)

    def end(self):
        print(SUMMARY.format(self.passed, self.failed, round(time.monotonic() - self.start)))
        return 1 if self.failed else 0


def expect(seen, wanted, what="output"):
    """Fails unless `seen` contains `wanted`."""
    if wanted not in seen:
        raise Failed(f"{what} lacks {wanted!r}:\n{seen}")


def scenarios():
    """Returns the scenarios by name, in the order in which they run."""
    found = {m.name: importlib.import_module(f"scenarios.{m.name}") for m in pkgutil.iter_modules([str(HERE / "scenarios")])}
    return dict(sorted(found.items(), key=lambda item: item[1].ORDER))
