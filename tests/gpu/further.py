"""Further servers of the pool (`--servers`): a program then has a lease on each, in one process."""

import os
import subprocess

from processes import HERE, stop_process


class Further:
    """A server with one GPU, beside the first one, whose pool it joins."""

    def __init__(self, first, number):
        self.first, self.number, self.process = first, number, None
        # Each has two ports, behind those of the first server.
        self.port = max(first.args.port, first.args.data_port) + 2 * number - 1
        self.folder = first.args.out / f"server-{number}"
        self.environment = dict(os.environ, GPUSERVER_CONF=str(self.folder / "gpuserver.toml"))

    def start(self):
        """Starts the server; the first start imports the pool's authority."""
        fresh = not self.folder.exists()
        if fresh:
            self.folder.mkdir()
            self.first.configure(self.folder, f"bench-{self.number}", self.port, self.port + 1, [self.number])
            pool = self.folder / "pool"
            pool.touch(0o600)
            pool.write_text(self.first.tool("pool", "export"))
            self.first.call(["./bin/gpuserver", "pool", "import", str(pool)], self.environment)
            pool.unlink()
        self.process = subprocess.Popen(
            [str(HERE / "bin/gpuserver"), "serve"],
            cwd=HERE,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self.first.log,
            stderr=self.first.log,
            start_new_session=True,
        )
        self.first.wait_for_port(self.process, self.port)

    def stop(self):
        """Asks the server to exit, then kills it."""
        stop_process(self.process)
