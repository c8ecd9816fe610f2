"""A client with gpusessiond, on a bus of its own: a machine that boots, and its logins.

A shell of a login takes the variables of `gpusession env`, and programs find the daemon's lease by
its socket. Sockets, descriptors and the question whether the unit restarts are as under systemd.
"""

import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

from descriptor_store import DescriptorStore
from processes import kill_group
from units import Units

# Users who run programs at a time.
USERS = 3
# Longest wait for a daemon, its lease or its rest, in seconds. A stop warns programs and waits for
# them.
LIMIT = 60
# Longest life of a lease that a daemon requested when it was killed, and time for releases.
EXPIRY, RELEASE_LIMIT = 65, 10
# Growth of the daemon's memory that caches may cause, in MiB.
GROWTH = 4
# Faults, and their weights.
FAULTS = {"daemon-killed": 3, "daemon-upgraded": 3, "daemon-stopped": 1}
# Words of `gpusession run` whose request was under way when the daemon exited.
INTERRUPTED = ("the daemon is not running", "the daemon does not answer")
# How programs get GPUs, and how often: by the variables of a login, by `gpusession run` on the same
# lease, or on a lease of their own.
SHELL = 'set -e; variables=$(./bin/gpusession env); eval "$variables"; exec "$@"'
WAYS = {("sh", "-c", SHELL, "sh"): 4, ("./bin/gpusession", "run", "--"): 1, ("./bin/gpusession", "run", "--new", "--memory", "256MiB", "--"): 3}
# As systemd passes the sockets.
SOCKETS = {"grant.sock": (socket.SOCK_STREAM, 0o666), "pam.sock": (socket.SOCK_SEQPACKET, 0o600)}
SOCKET_UNIT = "gpusession.socket"
# On a host systemd starts the daemon when the bus wants it; here a fault is about to.
BUS = """<busconfig>
<type>system</type><listen>unix:path={folder}/bus.sock</listen><auth>EXTERNAL</auth><servicedir>{folder}</servicedir>
<policy context="default">
<allow user="*"/><deny own="*"/><deny send_type="method_call"/><allow send_type="signal"/>
<allow send_requested_reply="true" send_type="method_return"/><allow send_requested_reply="true" send_type="error"/>
<allow receive_type="method_call"/><allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>
<allow send_destination="org.freedesktop.DBus"/><allow send_destination="org.freedesktop.systemd1"/>
</policy>
<include>{here}/org.gpusession1.conf</include>
<policy user="{uid}"><allow own="org.gpusession1"/><allow own="org.freedesktop.systemd1"/></policy>
</busconfig>
"""
ACTIVATION = "[D-BUS Service]\nName=org.gpusession1\nExec=/bin/true\nUser=root\n"
CONFIGURATION = """[client]
name = "{name}"
[access]
extra_leases = 16
[transport]
encryption = "server"
[[lease]]
name = "everyone"
{lease}
"""
# Words before a program of a login: it has the login's variables.
LOGIN = ("sh", "-c", SHELL, "sh")


def bus_program(here):
    """Returns the path of dbus-daemon: the machine's, else the bundle's; `None` without one."""
    return shutil.which("dbus-daemon") or shutil.which(here / "bus/dbus-daemon")


def why_not(here):
    """Returns why no client of this machine can have a daemon."""
    if bus_program(here) is None:
        return "dbus-daemon is not installed"
    return "" if (here / "bin/gpusessiond").exists() else "the bundle has no bin/gpusessiond"


class DaemonClient:
    """A machine with a daemon; `folder` is short, for sockets."""

    def __init__(self, number, args, server, here, folder, lease='memory = "2GiB"'):
        self.name, self.users = f"client-{number}", USERS
        self.server, self.here, self.folder = server, here, pathlib.Path(folder)
        self.home, self.log = args.out / "clients" / str(number), args.out / f"daemon-{number}.log"
        for path in (*(self.home / name for name in ("etc", "state", "credentials")), self.folder / "run"):
            path.mkdir(parents=True)
        (self.home / "etc/gpusession.toml").write_text(CONFIGURATION.format(name=self.name, lease=lease))
        (self.folder / "org.gpusession1.service").write_text(ACTIVATION)
        (self.folder / "bus.conf").write_text(BUS.format(folder=folder, here=here, uid=os.getuid()))
        self.bus = subprocess.Popen([bus_program(here), "--nofork", "--print-address", f"--config-file={folder}/bus.conf"],
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        # The bus prints its address once it listens.
        if not self.bus.stdout.readline():
            raise RuntimeError(f"dbus-daemon does not start with {folder}/bus.conf")
        self.units = Units(self.folder / "bus.sock")
        self.store = DescriptorStore(self.folder / "notify")
        self.servers = f'[[server]]\naddress = "127.0.0.1:{args.port}"\n'
        self.process, self.lease = None, ""
        # Folder of the daemon's program, and of another build, which replaces it.
        self.build, self.other_build = here / "bin", args.other_build
        # Descriptors and memory before, and the memory at the end.
        self.before, self.memory, self.after = {}, 0.0, 0.0
        # Ends of the latest fault of the daemon, and of the latest stop; when it last was killed or
        # restarted.
        self.disturbed = self.away = self.restarted = 0.0

    def join(self, token):
        """Lets the daemon join the pool by a token."""
        (self.home / "credentials/gpusession.token").write_text(token)
        (self.home / "etc/servers.toml").write_text(self.servers)
        self.listen()
        self.launch()
        self.wait(lambda: (self.home / "state/identity/client.pem").exists(), "no identity")
        self.shut_down()
        # The pool names the address of the relay, which passes on the data only.
        (self.home / "etc/servers.toml").write_text(self.servers)

    def environment(self):
        """Returns the environment of logins."""
        library = ":".join(filter(None, (str(self.here / "lib/gpusession"), os.environ.get("LD_LIBRARY_PATH"))))
        return dict(os.environ, DBUS_SYSTEM_BUS_ADDRESS=f"unix:path={self.folder}/bus.sock", XDG_CONFIG_HOME=str(self.home / "config"),
                    GPUSESSION_SOCKET=str(self.folder / "run/grant.sock"), LD_LIBRARY_PATH=library)

    def lease_for(self, own):
        """Returns the words before a program that make it use GPUs."""
        return own.choices(list(WAYS), list(WAYS.values()))[0]

    def excuse(self, why, begun):
        """Returns what explains this failure of an activity that began then."""
        if self.away > begun:
            return "daemon stopped"
        return "daemon interrupted" if self.disturbed > begun and any(words in why for words in INTERRUPTED) else ""

    # ---- the daemon

    def boot(self):
        """Starts sockets and daemon, and waits for the lease."""
        self.listen()
        self.start()

    def listen(self):
        """Opens the sockets on which programs and logins ask."""
        for name, (kind, mode) in SOCKETS.items():
            listening = socket.socket(socket.AF_UNIX, kind)
            listening.bind(str(self.folder / "run" / name))
            os.chmod(self.folder / "run" / name, mode)
            listening.listen(4096)
            with self.store.lock:
                self.store.kept.append((SOCKET_UNIT, listening.detach()))

    def launch(self):
        """Starts the daemon with the stored descriptors."""
        home = {f"{name.upper()}_DIRECTORY": str(self.home / path)
                for name, path in (("configuration", "etc"), ("state", "state"), ("credentials", "credentials"))}
        environment = dict(os.environ, DBUS_SYSTEM_BUS_ADDRESS=f"unix:path={self.folder}/bus.sock",
                           RUNTIME_DIRECTORY=str(self.folder / "run"), **home)
        with open(self.log, "ab") as log:
            self.process = self.store.popen([str(self.build / "gpusessiond")], environment, cwd=self.here, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)
        self.wait(self.store.ready.is_set, "the daemon does not start")

    def start(self):
        """Starts the daemon, and waits for its lease."""
        self.launch()
        shown = self.shows(lambda shown: shown["state"] == "ready" and self.everyone(shown), "no lease")
        self.lease = self.everyone(shown)

    @staticmethod
    def everyone(shown):
        """Returns the id of the machine's lease if it is held."""
        return next((lease["id"] for lease in shown["leases"] if lease["name"] == "everyone" and lease["server"]), "")

    def wait(self, good, what):
        """Waits until something is so, while the daemon runs."""
        end = time.monotonic() + LIMIT
        while not good():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name}: the daemon exited with status {self.process.returncode}; see {self.log.name}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: {what}, {LIMIT} s long; see {self.log.name}")
            time.sleep(0.05)

    def shows(self, good, what):
        """Waits until the daemon shows something; returns all that it shows."""
        shown = {}

        def asked():
            with contextlib.suppress(RuntimeError, ValueError):
                shown.update(json.loads(self.server.call(["./bin/gpusession", "status", "--json"], self.environment())))
                return good(shown)

        self.wait(asked, what)
        return shown

    def end(self, how):
        """Ends the daemon by a signal; returns its exit status."""
        self.process.send_signal(how)
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill_group((self.process,))
            raise RuntimeError(f"{self.name}: the daemon does not end by {how.name}") from None

    def shut_down(self):
        """Stops daemon and sockets, which releases all leases."""
        self.units.job = "stop"
        if status := self.end(signal.SIGTERM):
            raise RuntimeError(f"{self.name}: the stopped daemon has exit status {status}; see {self.log.name}")
        self.close()
        # The next daemon does not know a request that was under way, so that lease expires.
        end = max(time.monotonic() + RELEASE_LIMIT, self.restarted + EXPIRY)
        while left := [row["lease"] for row in json.loads(self.server.tool("leases", "--json"))["leases"] if row["client"] == self.name]:
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: the stopped daemon has not released {left}")
            time.sleep(0.5)

    def close(self):
        """Closes the sockets and drops all stored descriptors."""
        self.store.close()
        for name in SOCKETS:
            (self.folder / "run" / name).unlink(missing_ok=True)

    # ---- faults

    def replace(self, how, meanwhile=lambda: None):
        """Kills or restarts the daemon, which has to have the same lease afterwards.

        `meanwhile` is done while no daemon runs."""
        before, self.restarted = self.lease, time.monotonic()
        self.units.job = "restart"
        status = self.end(how)
        if how != signal.SIGKILL and status:
            raise RuntimeError(f"{self.name}: the restarted daemon has exit status {status}")
        meanwhile()
        if self.other_build is not None and (self.other_build / "gpusessiond").exists():
            self.build, self.other_build = self.other_build, self.build
        self.start()
        if self.lease != before:
            raise RuntimeError(f"{self.name}: lease {before} before, {self.lease} after a {how.name}")

    def disturb(self, kind):
        """Kills, restarts or stops the daemon, and starts the next one; returns what is wrong."""
        self.disturbed = float("inf")
        try:
            if self.process.poll() is not None:
                return f"{self.name}: the daemon exited with status {self.process.returncode}"
            if kind == "daemon-stopped":
                self.away = float("inf")
                self.shut_down()
                self.boot()
                return ""
            self.replace(signal.SIGKILL if kind == "daemon-killed" else signal.SIGTERM)
            return ""
        except RuntimeError as error:
            return str(error)
        finally:
            self.disturbed = time.monotonic()
            self.away = min(self.away, self.disturbed)

    # ---- figures

    def resident(self):
        """Returns the daemon's own memory in MiB."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))

    def descriptors(self):
        """Returns the numbers of the daemon's descriptors by kind, and of those in its store."""
        found = collections.Counter({"stored": len(self.store.kept)})
        for path in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[os.readlink(path).partition(":[")[0]] += 1
        return found

    def measure(self):
        """Keeps the figures that have to be at the end as now."""
        self.at_rest()
        self.before, self.memory = self.descriptors(), self.resident()

    def in_use(self):
        """Waits until the daemon knows a program of the machine's lease."""
        self.shows(lambda shown: any(lease["processes"] for lease in shown["leases"] if lease["id"] == self.lease), "no program is known")

    def at_rest(self):
        """Waits until no program uses a lease, and only the machine's lease exists."""
        self.shows(lambda shown: len(shown["leases"]) == 1 and not shown["leases"][0]["processes"], "not at rest")

    def leftovers(self):
        """Returns what the daemon has more than before."""
        try:
            self.at_rest()
        except RuntimeError as error:
            return [str(error)]
        end = time.monotonic() + LIMIT
        while (more := {key: count for key, count in self.descriptors().items() if count > self.before[key]}) and time.monotonic() < end:
            time.sleep(0.5)
        found = [f"{self.name}: descriptors of the daemon: {more}, before {dict(self.before)}"] if more else []
        self.after = self.resident()
        if self.after > self.memory + GROWTH:
            found.append(f"{self.name}: the daemon's memory grew from {self.memory:.1f} to {self.after:.1f} MiB")
        errors = [line for line in self.log.read_text(errors="replace").splitlines() if " ERROR " in line or "panick" in line]
        return found + [f"{self.name}: the daemon's log has {len(errors)} errors: {line[:300]}" for line in errors[:1]]

    def stop(self):
        """Ends what still runs."""
        if self.process is not None and self.process.poll() is None:
            kill_group((self.process,), signal.SIGTERM)
        self.close()
        self.units.close()
        kill_group((self.bus,), signal.SIGTERM)
