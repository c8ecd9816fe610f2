"""Speeds, natively and remotely in turn, and the link in the same run; goals of both."""

import glob
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

from processes import asked_of_the_link, kill_group, progress, torchrun, wait_for_line, wanted
from verdicts import LOSS, compare_losses, difference


class Samples:
    """Measurements by name and side."""

    def __init__(self):
        self.values, self.units = {}, {}

    def add(self, name, side, value, unit):
        """Adds a value."""
        self.values.setdefault(name, {}).setdefault(side, []).append(value)
        self.units[name] = unit

    def add_all(self, side, result, rename=lambda name: name):
        """Adds all measurements of a process."""
        for name, (value, unit) in result.measurements().items():
            self.add(rename(name), side, value, unit)

    def get(self, name, side):
        """Returns the median, or None."""
        values = self.values.get(name, {}).get(side)
        return statistics.median(values) if values else None


def bench_groups(args):
    """Returns (name, command, time limit, warm-up runs) of commands that print measurements."""
    quick = ["--quick"] if args.quick else []
    python = args.python
    ranks = torchrun(args) + ["ranks.py", *quick, "launches", "allreduce", "decode", "gpt2"]
    return [
        ("first", [python, "ops.py", "first"], 120, 1),
        ("micro", [python, "bench.py", *quick, "ops", "cuda_graph", "compile_mlp"], 400, 0),
        ("copies", [python, "bench.py", *quick, "copies"], 200, 0),
        ("launch-c", [str(args.tools / "launchLoop")], 120, 0),
        ("pauses", [str(args.tools / "pauses")], 60, 0),
        ("gpt2", [python, "bench.py", *quick, "train_gpt2", "generate_gpt2"], 400, 0),
        ("resnet50", [python, "bench.py", *quick, "train_resnet50"], 400, 0),
    ] + ([("ranks", ranks, 400, 0)] if args.gpus > 1 else [])


BENCH_EXTRAS = ("process", "memory", "waits", "two-clients", "delay")
TWO_CPUS = "@2cpu"


def bench_variants(args):
    """Returns the variants of each measurement: (side, processors, suffix of its name)."""
    two = (("remote", sorted(os.sched_getaffinity(0))[:2], TWO_CPUS),) if wanted(args, "two-cpus") and (not args.quick or args.only) else ()
    return (("native", None, ""), ("remote", None, ""), *two)


def disagreement(native, remote):
    """Returns the difference between native and remote results of a measurement, or nothing.

    The algorithms may be those that were the fastest in this run. So losses are compared less
    strictly than for conformance, and only in the steps before such differences grow."""
    def split(lines):
        losses = [line for line in lines if LOSS.search(line)]
        return losses, [line for line in lines if line not in losses]

    (native_losses, native_rest), (remote_losses, remote_rest) = split(native), split(remote)
    if native_rest != remote_rest:
        return difference(native_rest, remote_rest)
    of_first = [[line for line in lines if int(LOSS.search(line)[1]) < 10] for lines in (native_losses, remote_losses)]
    return compare_losses(*of_first, 1e-2)[0] if native_losses or remote_losses else ""


def bench_process(args, runner, samples, problems):
    """Measures the vectorAdd process; the first remote run warms the worker and does not count."""
    command = [str(args.programs / "13/vectorAdd")]
    for side in ("native", "remote"):
        runner.run(side, "process-warm-up", command)
    for _ in range(max(5, args.repeat)):
        for side, cpus, suffix in bench_variants(args):
            # Pause: the previous run's worker exits, and another one gets warm, which costs driver
            # time.
            time.sleep(1)
            result = runner.run(side, f"process{suffix}", command, cpus=cpus)
            if failure := result.failure():
                problems.append(f"process, {side}{suffix}: {failure}")
                continue
            samples.add(f"vectoradd_process{suffix}", side, result.wall * 1e3, "ms")
            samples.add(f"vectoradd_process_cpu{suffix}", side, result.cpu * 1e3, "ms")


def bench_two_clients(args, runner, samples, problems):
    """Measures two GPT-2 trainings at once on one GPU: the sum of their rates."""
    for side in ("native", "remote"):
        with tempfile.TemporaryDirectory() as folder:
            env = {"RENDEZVOUS": f"{folder}:2"}
            command = [args.python, "train_gpt2.py", "--steps", "30" if args.quick else "60"]
            started = [runner.start(side, f"two-clients-{i}", command, env=env) for i in range(2)]
            rates = []
            for process in started:
                result = runner.finish(process, 400)
                step = result.measurements().get("gpt2_train_step")
                if result.failure() or not step:
                    problems.append(f"two-clients, {side}: {result.failure()}")
                else:
                    rates.append(1e3 / step[0])
        if len(rates) == 2:
            samples.add("two_clients_gpt2", side, sum(rates), "steps/s")


def bench_delay(args, runner, samples, problems):
    """Measures with a proxy that adds delay to the link."""
    for number, delay in enumerate((100, 500), 1):
        # Control and data both pass through proxies; a preloaded library redirects the client's
        # connections.
        detours = {port: port + 100 * number for port in {args.port, args.data_port}}
        proxies = []
        try:
            for port, detour in detours.items():
                command = [str(args.tools / "link"), "delay", str(detour), f"127.0.0.1:{port}", str(delay)]
                proxies.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
                proxies[-1].stdout.readline()
            env = {
                "LD_PRELOAD": str(args.tools / "redirect.so"),
                "LINK_REDIRECT": ",".join(f"{port}={detour}" for port, detour in detours.items()),
            }
            command = [args.python, "bench.py", "--quick", "ops", "train_gpt2", "generate_gpt2"]
            for _, cpus, suffix in bench_variants(args)[1:]:
                name = f"@{delay}us{suffix}"
                result = runner.run("remote", f"delay{name}", command, 400, env=env, cpus=cpus)
                if failure := result.failure():
                    problems.append(f"delay{name}: {failure}")
                samples.add_all("remote", result, lambda measured, name=name: f"{measured}{name}")
        finally:
            for proxy in proxies:
                proxy.kill()
                proxy.wait()


def bench_waits(args, runner, samples, problems):
    """Counts frames and waits of a GPT-2 training step, and names the calls that wait.

    The numbers are those of the library's summary for twenty steps, minus those for ten."""
    counts, calls = [], []
    for steps in (10, 20):
        command = [args.python, "train_gpt2.py", "--steps", str(steps)]
        asked = asked_of_the_link(args, runner, f"waits-{steps}", command, 200)
        if isinstance(asked, str):
            problems.append(f"waits: {asked}")
            return
        counts.append(asked[:2])
        calls.append(asked[2])
    for name, ten, twenty in zip(("frames", "waits"), *counts):
        samples.add(f"gpt2_train_step_{name}", "remote", (twenty - ten) / 10, "")
    for name in calls[1]:
        if each := (calls[1][name] - calls[0].get(name, 0)) / 10:
            samples.add(f"gpt2_train_step_waits {name}", "remote", each, "")


def resident(process, pattern=""):
    """Returns the resident memory in MiB of a process, or of its mappings whose file matches."""
    total = 0.0
    with open(f"/proc/{process}/smaps", encoding="utf-8") as file:
        counts = not pattern
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                counts = not pattern or re.search(pattern, line) is not None
            elif words[0] == "Rss:" and counts:
                total += int(words[1]) / 1024
    return total


def processes(name):
    """Returns process ids by the name of their program."""
    found = []
    for path in glob.glob("/proc/[0-9]*/exe"):
        try:
            if os.path.basename(os.readlink(path)) == name:
                found.append(int(path.split("/")[2]))
        except OSError:
            pass
    return found


def arguments(process):
    """Returns the command line of a process; empty if it has exited."""
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def bench_memory(args, runner, samples, problems):
    """Measures the resident memory of a small program, its library, the server and idle workers."""
    program = [str(args.programs / "13/killVictim"), "1"]
    for name in ("gpuserver", "gpuserver-worker"):
        # A worker process with an argument is a helper of the server, without a context.
        ours = [p for p in processes(name) if name != "gpuserver-worker" or len(arguments(p)) == 1]
        sizes = [resident(process) for process in ours]
        if sizes:
            samples.add(f"resident_{name}_idle", "remote", statistics.median(sizes), "MiB")
    for side in ("native", "remote"):
        before = set(processes("killVictim"))
        started = runner.start(side, "memory", program)
        try:
            if not wait_for_line(started, "READY", 60):
                problems.append(f"memory, {side}: the program did not get ready")
                continue
            for process in set(processes("killVictim")) - before:
                samples.add("resident_program", side, resident(process), "MiB")
                samples.add("resident_libcuda", side, resident(process, r"libcuda\.so"), "MiB")
        finally:
            kill_group(started)


class OutOfTime(Exception):
    """The time budget is used up."""


def bench(args, runner, server, samples, link, problems):
    """Adds all measurements to the three collections, so that a failure keeps earlier ones."""
    began = time.monotonic()

    def next_part(text):
        if args.budget and time.monotonic() - began > args.budget:
            problems.append(f"not run, since the time budget is used up: {text} and later parts")
            raise OutOfTime
        progress(f"bench: {text}")

    if wanted(args, "link", "micro", "copies", "resnet50"):
        next_part("the link")
        result = runner.run("native", "link", [str(args.tools / "link"), "measure", "0.5" if args.quick else "1"], 60)
        link.update({name: value for name, (value, _) in result.measurements().items()})
        if failure := result.failure():
            problems.append(f"link: {failure}")
    if wanted(args, "process"):
        next_part("process")
        bench_process(args, runner, samples, problems)
    groups = [group for group in bench_groups(args) if wanted(args, group[0])]
    if args.no_torch:
        groups = [group for group in groups if group[0] in ("launch-c", "pauses")]
    for name, command, limit, warm_up in groups:
        for _ in range(warm_up):
            for side in ("native", "remote"):
                runner.run(side, f"{name}-warm-up", command, limit)
    for round_number in range(args.repeat):
        for name, command, limit, _ in groups:
            next_part(f"{name}, round {round_number + 1} of {args.repeat}")
            # In turn, in an order that changes from round to round, so that drift of the machine
            # affects all alike.
            variants = bench_variants(args)[:: 1 if round_number % 2 == 0 else -1]
            results = {}
            for side, cpus, suffix in variants:
                results[side, suffix] = result = runner.run(side, f"{name}{suffix}", command, limit, cpus=cpus)
                samples.add_all(side, result, lambda measured, suffix=suffix: f"{measured}{suffix}")
                where = f"{name}, {side}{suffix}, round {round_number + 1}"
                if failure := result.failure():
                    problems.append(f"{where}: {failure}")
                if bad := [line for line in result.lines() if "WRONG" in line or " OFF " in line]:
                    problems.append(f"{where}: {bad[0]}")
                if not server.alive():
                    problems.append(f"{where}: the server exited")
                    server.start()
            native = results.pop(("native", ""))
            for (_, suffix), result in results.items():
                if not native.failure() and not result.failure() and (why := disagreement(native.lines(), result.lines())):
                    problems.append(f"{name}{suffix}, round {round_number + 1}: results differ from the native ones: {why}")
    extras = {
        "memory": bench_memory,
        "waits": bench_waits,
        "two-clients": bench_two_clients,
        "delay": bench_delay,
    }
    for name, measure in extras.items():
        # With --quick only if requested.
        if not wanted(args, name) or (args.quick and not args.only) or (args.no_torch and name != "memory"):
            continue
        next_part(name)
        measure(args, runner, samples, problems)


# (name, goal as text, goal for a plain link, for an encrypted one). A ratio is remote / native.
RATIO_AT_MOST = {
    "vectoradd_process": (0.35, 0.40),
    "first_op_and_matmul": (1.0, 1.05),
    "gpt2_train_step": (1.01, 1.02),
    "resnet50_prefetch_step": (1.02, 1.05),
    "gpt2_generate": (1.03, 1.05),
    "cuda_graph_replay": (1.05, 1.05),
    "compile_forward": (1.05, 1.05),
    "gpt2_train_step_cpu": (1.3, 1.3),
}
RATIO_AT_LEAST = {"launch_rate_python": (1.0, 1.0), "launch_rate_c": (0.95, 0.95), "launch_rate_busy": (0.95, 0.95), "two_clients_gpt2": (1.0, 1.0)}
DELAYED = {"gpt2_train_step": {100: 1.01, 500: 1.03}, "gpt2_generate": {100: 1.10, 500: 1.40}}
LINK_SHARE = {"h2d_pinned": (0.90, 0.60), "d2h_pinned": (0.90, 0.60)}


def goal_of(name, samples, link, encrypted):
    """Returns (goal as text, met), with None where no goal or figure exists."""
    native, remote = samples.get(name, "native"), samples.get(name, "remote")
    if remote is None:
        return None
    column = 1 if encrypted else 0
    if name.endswith(TWO_CPUS):
        usual = name.removesuffix(TWO_CPUS)
        many = samples.get(usual, "remote")
        # For parts with a goal of their own.
        if not many or usual.endswith("_cpu") or goal_of(usual, samples, link, encrypted) is None:
            return None
        rate = samples.units[name] in ("k/s", "GB/s")
        return "5 % of many", (remote >= many / 1.05 if rate else remote <= many * 1.05)
    base, _, variant = name.partition("@")
    if variant.endswith("us") and base in DELAYED:
        native = samples.get(base, "native")
        limit = DELAYED[base][int(variant[:-2])]
        return (f"<= {limit:.2f}x", remote <= limit * native) if native else None
    if name in LINK_SHARE and link.get("link_bulk_tcp_4"):
        share = LINK_SHARE[name][column]
        needed = share * link["link_bulk_tcp_4"]
        return f">= {needed:.1f} GB/s", remote >= needed
    if name == "gpt2_train_step_waits":
        # One wait for the loss that the program reads back; no other call may wait.
        return "<= 1", remote <= 1
    if native is None:
        return None
    if name in RATIO_AT_MOST:
        limit = RATIO_AT_MOST[name][column]
        return f"<= {limit:.2f}x", remote <= limit * native
    if name in RATIO_AT_LEAST:
        limit = RATIO_AT_LEAST[name][column]
        return f">= {limit:.2f}x", remote >= limit * native
    if name == "item" and link.get("link_rtt_tcp_spinning"):
        limit = native + 1.5 * link["link_rtt_tcp_spinning"]
        return f"<= {limit:.1f} us", remote <= limit
    if name == "resnet50_train_step" and link.get("link_bulk_tcp_4") and samples.get("h2d_pinned", "native"):
        size = samples.get("resnet50_input_bytes", "remote") / 1e6
        limit = 1.02 * (native + size / link["link_bulk_tcp_4"] - size / samples.get("h2d_pinned", "native"))
        return f"<= {limit:.2f} ms", remote <= limit
    return None


def number(value):
    """Formats a value with about four significant digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def show(samples, link, problems, encrypted):
    """Prints the table of speeds, and returns it as a list."""
    rows = []
    for name in samples.values:
        if "_bytes" in name:
            continue
        native, remote = samples.get(name, "native"), samples.get(name, "remote")
        # Runs on two processors, compared with runs on many.
        usual = native if not name.endswith(TWO_CPUS) else samples.get(name.removesuffix(TWO_CPUS), "remote")
        ratio = remote / usual if usual and remote is not None else None
        goal = goal_of(name, samples, link, encrypted)
        rows.append(
            {
                "name": name,
                "unit": samples.units[name],
                "native": native,
                "remote": remote,
                "ratio": ratio,
                "goal": goal[0] if goal else None,
                "met": goal[1] if goal else None,
                "samples": samples.values[name],
            }
        )
    print(f"\n{'':34} {'unit':>8} {'native':>9} {'remote':>9} {'ratio':>7}  goal")
    for row in rows:
        met = "" if row["met"] is None else "met" if row["met"] else "MISSED"
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else "-"
        print(
            f"{row['name']:34} {row['unit']:>8} {number(row['native']):>9} {number(row['remote']):>9} {ratio:>7}  "
            f"{row['goal'] or '':14} {met}".rstrip()
        )
    if link:
        print("\nThe link (loopback) in the same run")
        for name, value in link.items():
            print(f"{name:34} {'us' if 'rtt' in name else 'GB/s':>8} {number(value):>9}")
    missed = [row["name"] for row in rows if row["met"] is False]
    print(
        f"\nGoals: {sum(row['met'] is True for row in rows)} met, {len(missed)} missed"
        + (": " if missed else "")
        + ", ".join(missed)
    )
    for problem in problems:
        print(f"problem: {problem}")
    return rows
