"""Replaces systemd: keeps descriptors of gpuserver or gpusessiond, and passes them to the next."""
import contextlib
import fcntl
import os
import socket
import subprocess
import threading

# As in gpuserver's unit.
SIZE = 1040


class DescriptorStore:
    """Starts servers that hand their programs over to each other; `path` is its socket."""

    def __init__(self, path):
        self.path, self.kept = path, []
        # True once the last server has reported that it serves.
        self.ready = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.lock = threading.RLock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        # The server may have another user.
        os.chmod(path, 0o666)
        folder = os.path.dirname(path)
        os.chmod(folder, os.stat(folder).st_mode | 0o011)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Receives messages until the process exits."""
        while True:
            text, fds, _, _ = socket.recv_fds(self.socket, 4096, 8)
            for fd in fds:
                # The next server gets only the copies of `start`.
                os.set_inheritable(fd, False)
            lines = text.decode(errors="replace").split("\n")
            name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
            if "FDSTORE=1" in lines:
                with self.lock:
                    # A listening socket replaces the stored one of its name.
                    if any(kept == name for kept, _ in self.kept) and len(fds) == 1:
                        self.remove(name)
                    self.kept += [(name, fd) for fd in fds]
            else:
                for fd in fds:
                    os.close(fd)
            if "READY=1" in lines:
                self.ready.set()
            if "FDSTOREREMOVE=1" in lines:
                self.remove(name)

    def remove(self, name):
        """Drops the descriptors of this name."""
        with self.lock:
            for _, fd in [entry for entry in self.kept if entry[0] == name]:
                os.close(fd)
            self.kept = [entry for entry in self.kept if entry[0] != name]

    def replace(self, server, how):
        """Replaces a server's control process, by a kill or as an upgrade of its package."""
        server.process.send_signal(how)
        server.process.wait()
        server.change_build()
        server.start_server()
        if not self.ready.wait(60):
            raise RuntimeError("the next server did not start")

    def close(self):
        """Drops all descriptors, as at a stop of the unit."""
        for name in {name for name, _ in self.kept}:
            self.remove(name)

    def popen(self, command, env, **options):
        """Calls `subprocess.Popen` with the stored descriptors."""
        self.hear()
        self.ready.clear()
        # Messages of a killed process may still arrive: no descriptor is closed before the child
        # has its copies.
        with self.lock:
            return self.start(command, env, options)

    def hear(self):
        """Waits until all messages sent before are heard, as systemd does before a start."""
        end, sent = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(str(self.path))
            socket.send_fds(sender, [b"BARRIER=1"], [sent])
        os.close(sent)
        # `listen` closes the descriptor of an unknown message.
        os.read(end, 1)
        os.close(end)

    def start(self, command, env, options):
        names, fds = [name for name, _ in self.kept], [fd for _, fd in self.kept]

        def place():
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds) + 64) for fd in fds]
            for target, fd in enumerate(high, 3):
                os.dup2(fd, target)

        environment = {**env, "NOTIFY_SOCKET": str(self.path), "FDSTORE": str(SIZE),
                       "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(names)}
        shell = ["sh", "-c", 'export LISTEN_PID=$$; exec "$@"', "sh", *command]
        return subprocess.Popen(shell, env=environment, close_fds=False, preexec_fn=place, **options)
