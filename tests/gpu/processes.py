"""Starts programs natively or remotely, and keeps their output."""

import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
# A process that writes more is killed, before it fills the disk.
OUTPUT_LIMIT = 64 << 20
# The first characters of a measurement (`common.measure`); no other line is one.
MEASUREMENT = '{"name": '


def progress(text):
    """Prints one line on standard error while something long runs."""
    print(text, file=sys.stderr, flush=True)


def wanted(args, *names):
    """Returns True if --only selects one of the names."""
    return not args.only or any(fnmatch.fnmatch(name, pattern) for name in names for pattern in args.only)


def kill_group(started, how=signal.SIGKILL):
    """Kills the process group of a started process."""
    process = started[0]
    if process is None:
        return
    for number in (how, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            pass


def torchrun(args):
    """Returns the words before a script that runs in a process for each GPU."""
    return [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]


def wait_for_line(started, word, limit):
    """Waits until a process has written a word; returns False at the limit."""
    process, base, began = started
    path = pathlib.Path(f"{base}.out")
    while process is not None and process.poll() is None and time.monotonic() - began < limit:
        if word in path.read_text(errors="replace"):
            return True
        time.sleep(0.01)
    return False


@dataclasses.dataclass
class Result:
    """Exit status, output and duration of a process."""

    status: int
    out: str
    err: str
    wall: float
    cpu: float
    # Why the runner killed the process, or an empty string.
    killed: str = ""

    def lines(self):
        """Returns the result lines, without the measurements."""
        return [line for line in self.out.splitlines() if not line.startswith(MEASUREMENT)]

    def measurements(self):
        """Returns the measurements by name."""
        found = {}
        for line in self.out.splitlines():
            if line.startswith(MEASUREMENT):
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if "value" in entry:
                    found[entry["name"]] = (entry["value"], entry["unit"])
        return found

    def failure(self, expected=0):
        """Returns the failure in one line, or an empty string."""
        if self.killed:
            return self.killed
        if self.status == expected:
            return ""
        how = f"signal {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"
        said = [line for line in self.lines() + self.err.splitlines() if line.strip()]
        return f"{how}: {said[-1].strip()[:160]}" if said else how


class Runner:
    """Starts processes natively or remotely, and keeps their outputs."""

    def __init__(self, args, server):
        self.args, self.server, self.count = args, server, 0
        self.running = set()

    def start(self, side, tag, command, env=None, cpus=None, cwd=HERE):
        """Starts a process; its output goes to files."""
        self.count += 1
        base = self.args.out / f"{self.count:04d}-{re.sub('[^A-Za-z0-9_.-]+', '_', tag)}-{side}"
        full, extra = shlex.split(self.args.native_prefix.format(here=HERE)) + command, {}
        if side == "native":
            # The GPUs that programs lease, and no others.
            extra = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.args.gpus))))}
        elif side == "client":
            full = command
        elif side == "remote":
            full, extra = self.server.remote(command)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **extra, **(env or {})}
        out, err = open(f"{base}.out", "wb"), open(f"{base}.err", "wb")
        if self.args.verbose:
            print(f"  [{side}] {shlex.join(full)}", file=sys.stderr, flush=True)
        try:
            process = subprocess.Popen(
                full,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
            )
        except OSError as error:
            err.write(f"cannot start: {error}\n".encode())
            process = None
        out.close()
        err.close()
        if process is not None:
            self.running.add(process)
        return process, base, time.monotonic()

    def stop(self):
        """Kills the processes that still run, without a wait: `finish` may wait for them."""
        for process in list(self.running):
            if process.returncode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def finish(self, started, limit):
        """Waits for a process, up to a limit, and reads its output."""
        process, base, began = started
        outputs = [pathlib.Path(f"{base}.{end}") for end in ("out", "err")]
        if process is None:
            return Result(127, "", outputs[1].read_text(errors="replace"), 0.0, 0.0)
        ended = []

        def wait():
            _, status, usage = os.wait4(process.pid, 0)
            ended.extend((time.monotonic(), os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))

        # A process inside of the driver may survive SIGKILL; then only this thread waits forever.
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        killed = ""
        while waiter.is_alive() and not killed:
            left = limit - (time.monotonic() - began)
            waiter.join(max(0.0, min(0.5, left)))
            if any(path.stat().st_size > OUTPUT_LIMIT for path in outputs):
                killed = f"more than {OUTPUT_LIMIT >> 20} MiB of output"
            elif left <= 0 and waiter.is_alive():
                killed = "time limit"
        if killed:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            waiter.join(10)
        end, process.returncode, cpu = ended or (time.monotonic(), -signal.SIGKILL, 0.0)
        if not ended:
            killed += ", and it survives SIGKILL"
        out, err = (self.text(path) for path in outputs)
        return Result(process.returncode, out, err, end - began, cpu, killed)

    @staticmethod
    def text(path):
        """Returns the text of an output, up to the limit."""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(OUTPUT_LIMIT)

    def run(self, side, tag, command, limit=60, **more):
        """Starts a process and waits for it."""
        return self.finish(self.start(side, tag, command, **more), limit)


def stop_process(process):
    """Asks a server's process to exit, then kills its group."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked_of_the_link(args, runner, tag, command, limit):
    """Returns frames, waits, and waits by call from the library's own summary, or an error text."""
    trace = args.out / f"trace-summary-{tag}.txt"
    env = {"GPUSESSION_TRACE": "summary", "GPUSESSION_TRACE_FILE": str(trace)}
    trace.unlink(missing_ok=True)
    result = runner.run("remote", tag, command, limit, env=env)
    text = trace.read_text(errors="replace") if trace.exists() else ""
    found = re.search(r"(\d+) frames .* (\d+) waits", text)
    if result.failure() or not found:
        return result.failure() or "no summary"
    return int(found[1]), int(found[2]), {name: int(count) for count, name in re.findall(r"(\d+) (\w+) \d+ ms", text)}
