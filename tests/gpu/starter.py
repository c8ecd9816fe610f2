"""The server's starter: server and workers have users of their own, as with the packages."""

import os
import pathlib
import pwd
import signal
import socket
import subprocess
import time

from processes import HERE, kill_group

# The starter knows the server's user by name; that of workers needs no name.
SERVER = pwd.getpwnam("nobody")
WORKERS = 65533


class Starter:
    """Runs `gpuserver-starter` with its folders below `folder`."""

    def __init__(self, folder):
        if os.geteuid() != 0:
            raise RuntimeError("--users: only root starts programs of other users")
        self.folder, self.process = folder, None

    def start(self, environment, log):
        """Starts the starter; a further call changes nothing."""
        if self.process is not None:
            return
        closed = [str(above) for above in self.folder.parents if not above.stat().st_mode & 0o001]
        if closed:
            raise RuntimeError(f"--users: other users cannot enter {', '.join(closed)}; name another folder by --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.own(self.folder, WORKERS)
        self.process = subprocess.Popen(
            [HERE / "bin/gpuserver-starter", "--user", SERVER.pw_name, "--listen", self.socket(), "--mps", self.folder / "mps"],
            cwd="/",
            env=dict(environment, CACHE_DIRECTORY=str(self.folder / "code"), GPUSERVER_WORKER=str(HERE / "bin/gpuserver-worker")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            **self.as_worker(),
        )
        end = time.monotonic() + 20
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"gpuserver-starter does not answer; see {log.name}")
            time.sleep(0.05)
        # In a unit, the socket has the server's group.
        os.chmod(self.socket(), 0o666)

    def socket(self):
        """Returns the path of the socket."""
        return self.folder / "start.sock"

    def answers(self):
        """Returns True if something listens."""
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket()))
        except OSError:
            return False
        return True

    def stop(self):
        """Kills the starter, and what has outlived it."""
        held, self.process = self.process, None
        if held is not None:
            kill_group((held,), signal.SIGKILL)
            subprocess.run(["pkill", "-KILL", "-U", str(WORKERS)], check=False)
            self.socket().unlink(missing_ok=True)

    @staticmethod
    def own(folder, user=SERVER.pw_uid):
        """Gives a folder with all that is in it to a user, by default the server's."""
        for path in [pathlib.Path(folder), *pathlib.Path(folder).rglob("*")]:
            os.chown(path, user, user, follow_symlinks=False)

    @staticmethod
    def as_server():
        """Returns the options of `subprocess` for a program of the server's user."""
        return {"user": SERVER.pw_uid, "group": SERVER.pw_gid, "extra_groups": []}

    @staticmethod
    def as_worker():
        """Returns the options of `subprocess` for a program of the workers' user."""
        return {"user": WORKERS, "group": WORKERS, "extra_groups": []}
