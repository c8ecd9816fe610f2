"""The server under test, and the client's lease."""

import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import tempfile
import time

from further import Further
from processes import HERE, kill_group, stop_process
from starter import Starter

# Only these lines depend on gpusession's command lines.
REMOTE_PREFIX = "{here}/bin/gpusession run {servers} --allow-clear --gpus {gpus} --"


class Server:
    """The server under test: the runner creates its pool below the output folder, and joins it."""

    def __init__(self, args):
        self.args, self.process, self.log, self.holder, self.lease = args, None, None, None, {}
        self.configuration = args.out / "gpuserver.toml"
        self.popen = subprocess.Popen
        # Folder of the server's program, and of another build, which replaces it.
        self.build, self.other_build = HERE / "bin", args.other_build
        # Folder of the client's identity, apart from the caller's own.
        self.client_home = args.out / "config"
        self.environment = dict(os.environ, GPUSERVER_CONF=str(self.configuration))
        self.starter = Starter(args.out / "start") if args.users else None
        self.further = [Further(self, number) for number in range(1, args.servers)]

    def client_environment(self):
        """Returns the variables that the client's command line needs."""
        return {"XDG_CONFIG_HOME": str(self.client_home)} if self.args.server_command is None else {}

    def prefix(self):
        """Returns the words before a remote command."""
        ports = [self.args.port, *(server.port for server in self.further)]
        known = {
            "servers": " ".join(f"--server 127.0.0.1:{port}" for port in ports),
            "port": self.args.port,
            "gpus": self.args.gpus,
            "here": shlex.quote(str(HERE)),
        }
        return shlex.split(self.args.remote_prefix.format(**known))

    def remote(self, command):
        """Returns the command line and environment that make a command remote."""
        if self.args.lease == "each":
            return self.prefix() + command, self.client_environment()
        return command, self.lease

    def hold_lease(self):
        """Takes one lease for all remote programs, like a boot lease: its workers are warm."""
        found = self.args.out / "lease-environment"
        found.unlink(missing_ok=True)
        script = 'env -0 >"$0.new" && mv "$0.new" "$0"; exec sleep 1000000'
        environment = dict(os.environ, **self.client_environment())
        self.holder = subprocess.Popen(
            [*self.prefix(), "sh", "-c", script, str(found)],
            cwd=HERE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        end = time.monotonic() + 60
        while not found.exists():
            if self.holder.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no lease from the server; see {self.args.out / 'server.log'}")
            time.sleep(0.01)
        entries = dict(entry.split("=", 1) for entry in found.read_text().split("\0") if "=" in entry)
        self.lease = {
            name: value for name, value in entries.items() if name.startswith("GPUSESSION_") or name == "LD_LIBRARY_PATH"
        }

    def release_lease(self):
        """Releases the lease; returns True if there was one."""
        held, self.holder = self.holder, None
        if held is not None:
            kill_group((held,), signal.SIGTERM)
        return held is not None

    def start(self):
        """Starts the server and waits for its port; the first start creates and joins the pool."""
        self.release_lease()
        if self.log is None:
            self.log = open(self.args.out / "server.log", "ab")
        self.start_server()
        if self.args.lease == "shared":
            self.hold_lease()

    def start_server(self):
        """Starts the server process."""
        command = [str(self.build / "gpuserver"), "serve"]
        fresh = not self.client_home.exists()
        if self.args.server_command is not None:
            command = shlex.split(self.args.server_command.format(port=self.args.port, here=HERE))
            fresh = False
        if not command:
            return
        if fresh:
            self.write_configuration()
            self.tool("pool", "init")
        if self.starter is not None:
            self.starter.start(self.environment, self.log)
        self.process = self.popen(
            command,
            cwd=HERE,
            **self.user(),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        self.wait_for_port(self.process, self.args.port)
        for server in self.further:
            server.start()
        if fresh:
            token = json.loads(self.tool("token", "create", "--json"))["token"]
            token = token["token"] if isinstance(token, dict) else token
            self.client_home.mkdir(parents=True, exist_ok=True)
            join = ["./bin/gpusession", "join", token, "--server", f"127.0.0.1:{self.args.port}", "--user"]
            self.call(join, dict(os.environ, **self.client_environment()))

    def user(self):
        """Returns the options of `subprocess` for a program of the server's user."""
        return {} if self.starter is None else self.starter.as_server()

    def change_build(self):
        """Makes the next start one of the other build, if there is one."""
        if self.other_build is not None:
            self.build, self.other_build = self.other_build, self.build

    def write_configuration(self):
        """Writes the configuration of the server."""
        gpus = [0] if self.further else None
        self.configure(self.args.out, "bench", self.args.port, self.args.data_port, gpus)

    def configure(self, folder, name, port, data_port, gpus):
        """Writes the configuration of a server for this machine alone; `gpus`: None for all."""
        # The path of a Unix socket has at most 107 bytes.
        runtime = folder / "run" if len(str(folder)) < 60 else pathlib.Path(tempfile.mkdtemp(prefix="gpu-run-"))
        lines = [
            f'name = "{name}"',
            f'listen = "127.0.0.1:{port}"',
            f'data_ports = "{data_port}"',
            *([] if gpus is None else [f"gpus = {gpus}"]),
            f'state_dir = "{folder / "state"}"',
            f'runtime_dir = "{runtime}"',
            f'encryption = "{"on" if self.args.encrypted else "off"}"',
            'trusted_networks = ["127.0.0.0/8"]',
            'drain_timeout = 0',
            *([] if self.starter is None else [f'starter = "{self.starter.socket()}"']),
            'limits.gpus = 64',
            *self.args.server_config,
        ]
        for made in (runtime, folder / "state"):
            made.mkdir(exist_ok=True)
            if self.starter is not None:
                self.starter.own(made)
        (folder / "gpuserver.toml").write_text("\n".join(lines) + "\n")

    def tool(self, *words):
        """Runs a command of gpuserver."""
        return self.call(["./bin/gpuserver", *words], self.environment, **self.user())

    def call(self, command, environment, **options):
        """Runs a short command; returns its output, or raises an error that quotes it."""
        try:
            done = subprocess.run(
                command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=60, check=False, **options
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{shlex.join(command[:3])}: {error}") from error
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command[:3])}: {(done.stderr + done.stdout).strip()[-500:]}")
        return done.stdout

    def wait_for_port(self, process, port):
        """Waits until a server accepts connections."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"the server exited with status {process.returncode}; see {self.log.name}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"the server does not answer on port {port}; see {self.log.name}")

    def alive(self):
        """Returns True if the server still runs, or was started by another program."""
        return self.process is None or self.process.poll() is None

    def stop(self):
        """Asks the server to exit, then kills it."""
        self.release_lease()
        stop_process(self.process)
        for server in self.further:
            server.stop()
        if self.starter is not None:
            self.starter.stop()
        if self.log is not None:
            self.log.close()
        self.process = self.log = None
