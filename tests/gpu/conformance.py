"""Each program and script, natively and remotely: outputs and exit statuses are compared."""

import glob
import os
import shutil
import time

from processes import Result, asked_of_the_link, kill_group, progress, torchrun, wait_for_line, wanted
from verdicts import EXPECTED_STATUS, as_recorded, judge, stand_in

NOT_COMPARED = {"killVictim", "memFree"}  # used by other checks
RUNTIMES = ("13", "12.4")


def torch_scripts(args):
    """Returns (name, command, kind of comparison, time limit) of each script."""
    steps = "4" if args.quick else "10"
    python = args.python
    return [
        ("torch-matmul", [python, "matmul.py"], "exact", 180),
        ("torch-fft", [python, "fft.py"], "exact", 180),
        ("torch-tensor-queues", [python, "tensor_queues.py"], "exact", 180),
        ("torch-cuda-graph", [python, "cuda_graph.py"], "exact", 180),
        ("torch-compile", [python, "compile_mlp.py"], "exact", 300),
        ("torch-copies", [python, "bench.py", "--quick", "copies"], "exact", 180),
        ("torch-large-copies", [python, "copies.py"], "exact", 180),
        ("torch-ops", [python, "bench.py", "--quick", "ops"], "exact", 180),
        ("torch-gpt2-deterministic", [python, "train_gpt2.py", "--deterministic", "--steps", steps], "exact", 300),
        ("torch-gpt2", [python, "train_gpt2.py", "--steps", steps], "losses", 300),
        ("torch-gpt2-generate", [python, "generate_gpt2.py"], "exact", 300),
        (
            "torch-resnet50-deterministic",
            [python, "train_resnet50.py", "--deterministic", "--steps", steps, "--batch", "32"],
            "exact",
            300,
        ),
        ("torch-resnet50", [python, "train_resnet50.py", "--steps", steps], "losses", 300),
        ("torch-resnet50-prefetch", [python, "train_resnet50.py", "--prefetch", "--steps", steps], "losses", 300),
    ] + of_two(args)


def of_two(args):
    """Returns the scripts that need two GPUs."""
    if args.gpus < 2:
        return []
    return [(f"torch-two-gpus-{part}", [args.python, "two_gpus.py", part], "exact", 90) for part in ("copies", "nccl")] + [
        ("torch-ranks-killed", [*torchrun(args), "ranks.py", "killed"], "exact", 120)
    ]


def programs(args):
    """Returns (name, path) of every existing program."""
    found = []
    for runtime in RUNTIMES:
        for path in sorted(glob.glob(str(args.programs / runtime / "*"))):
            if os.path.basename(path) not in NOT_COMPARED:
                found.append((f"{os.path.basename(path)}@{runtime}", path))
    return found


def check_pairs(args, runner, server):
    """Runs every program and script, native and remote."""
    entries = [(name, [path], "exact", 90) for name, path in programs(args)]
    if not args.no_torch:
        entries += torch_scripts(args)
    results = []
    for name, command, kind, limit in entries:
        if not wanted(args, name, name.partition("@")[0]):
            continue
        expected = EXPECTED_STATUS.get(name.partition("@")[0], 0)
        recorded = stand_in(name, args.stand_in)
        if recorded is None:
            native = runner.run("native", name, command, limit)
        else:
            native = Result(status=expected, out=recorded, err="", wall=0, cpu=0)
        if args.record and "@" in name and not native.failure(expected):
            args.record.mkdir(parents=True, exist_ok=True)
            (args.record / f"{name}.out").write_text(native.out)
        remote = runner.run("remote", name, command, limit)
        verdict, why = judge(kind, native, remote, expected)
        if verdict == "ok" and args.recorded and (other := as_recorded(name, native, args.recorded)):
            verdict, why = "DIFFERS", other
        if not server.alive():
            verdict, why = "FAILED", "the server exited; " + why
            server.start()
        results.append(
            {
                "name": name,
                "verdict": verdict,
                "why": why,
                "native_s": round(native.wall, 3),
                "remote_s": round(remote.wall, 3),
            }
        )
        progress(f"  {name:34} {verdict:14} {native.wall:7.2f} s {remote.wall:7.2f} s  {why}")
    return results


def free_memory(args, runner):
    """Returns the machine's free device memory in MiB."""
    tool = shutil.which("nvidia-smi")
    if tool:
        done = runner.run("native", "memory", [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"], 20)
    else:
        done = runner.run("native", "memory", [str(args.programs / "13/memFree")], 20)
    return int(done.out.split()[0])


def check_kill(args, runner):
    """Checks that kill -9 of a client program frees its device memory within two seconds."""
    # The worker of the previous program may still be exiting.
    before, last = free_memory(args, runner), None
    while before != last:
        time.sleep(0.5)
        before, last = free_memory(args, runner), before
    victim = runner.start("remote", "kill-victim", [str(args.programs / "13/killVictim"), "1024"])
    try:
        if not wait_for_line(victim, "READY", 60):
            return "FAILED", "the victim did not get ready"
        during = free_memory(args, runner)
        if before - during < 900:
            return "FAILED", f"1024 MiB in use do not show: {before} MiB free before, {during} during"
    finally:
        kill_group(victim)
    killed = time.monotonic()
    while time.monotonic() - killed < 10:
        # All memory has to be free, except what an idle worker keeps.
        if free_memory(args, runner) >= during + 1000:
            taken = time.monotonic() - killed
            return ("ok" if taken <= 2 else "FAILED"), f"1024 MiB free again after {taken:.2f} s"
        time.sleep(0.02)
    return "FAILED", "the memory is not free 10 s after the kill"


def check_isolation(args, runner):
    """Checks that clients that work or hold memory do not notice another client's fault."""
    program = lambda name: [str(args.programs / "13" / name)]  # noqa: E731
    victim = runner.start("remote", "isolation-holder", program("killVictim") + ["256"])
    try:
        if not wait_for_line(victim, "READY", 60):
            return "FAILED", "the holder did not get ready"
        for round_number in range(2):
            started = [
                (name, runner.start("remote", f"isolation-{name}", program(name)))
                for name in ("threads", "outOfBounds", "matrixMul", "devAssert", "manyKernels")
            ]
            for name, process in started:
                result = runner.finish(process, 90)
                if failure := result.failure(EXPECTED_STATUS.get(name, 0)):
                    return "FAILED", f"round {round_number}: {name}: {failure}"
        if victim[0].poll() is not None:
            return "FAILED", "the holder exited"
    finally:
        kill_group(victim)
    return "ok", "two rounds of five clients while a sixth holds memory"


def check_own_leases(args, runner):
    """Checks programs that each take and release a lease of their own."""
    command = [*runner.server.prefix(), str(args.programs / "13/vectorAdd")]
    # The shared lease may hold the only GPU.
    shared = runner.server.release_lease()
    try:
        for _ in range(3):
            result = runner.run("client", "own-lease", command, 60, env=runner.server.client_environment())
            if failure := result.failure():
                return "FAILED", failure
    finally:
        if shared:
            runner.server.hold_lease()
    return "ok", f"three programs, the last in {result.wall:.2f} s with lease and release"


def check_launches(args, runner):
    """Checks that repeated launches do not wait: a thousand wait no more often than ten."""
    few, many = 10, 1000
    seen = []
    # The first run may have to send the image to the server.
    for launches in (few, few, many):
        asked = asked_of_the_link(args, runner, f"launches-{launches}", [args.python, "launches.py", str(launches)], 60)
        if isinstance(asked, str):
            return "FAILED", asked
        seen.append(asked)
    (frames, waits, calls), (more_frames, more_waits, more_calls) = seen[1:]
    # Each round launches twice.
    if more_frames - frames < 2 * (many - few):
        return "FAILED", f"{frames} frames with {few} rounds of launches, {more_frames} with {many}: the counts cannot be right"
    if more_waits != waits:
        other = sorted(name for name in calls.keys() | more_calls.keys() if calls.get(name) != more_calls.get(name))
        return "FAILED", f"{waits} waits with {few} rounds of launches, {more_waits} with {many}: {', '.join(other)}"
    return "ok", f"{waits} waits with {few} rounds of launches and with {many}"


SINGLE_CHECKS = {
    "kill": check_kill,
    "isolation": check_isolation,
    "own-leases": check_own_leases,
    "launches": check_launches,
}


def run(args, runner, server):
    """Runs all checks; returns a list of entries."""
    progress("conformance: native and remote, outputs and exit statuses compared")
    results = check_pairs(args, runner, server)
    for name, check in SINGLE_CHECKS.items():
        if not wanted(args, name):
            continue
        try:
            verdict, why = check(args, runner)
        except (OSError, RuntimeError, ValueError, IndexError) as error:
            verdict, why = "FAILED", f"{type(error).__name__}: {error}"
        results.append({"name": name, "verdict": verdict, "why": why})
        progress(f"  {name:34} {verdict:14} {'':21} {why}")
    return results


def show(results):
    """Prints the table, with the failures last."""
    bad = [entry for entry in results if entry["verdict"] != "ok"]
    print(f"\nConformance: {len(results) - len(bad)} of {len(results)} as native")
    for entry in bad:
        print(f"  {entry['name']:34} {entry['verdict']:14} {entry['why']}")
