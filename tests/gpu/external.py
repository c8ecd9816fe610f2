"""`./run external FOLDER...`: programs of other projects, natively and remotely.

Exit status, output and files have to be equal. README.md has the layout of a folder.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import statistics
import threading
import time

from processes import progress, wanted
from variable import check_rules, same_shape, without_variable
from verdicts import judge

# A program's last line says why it cannot run here.
SKIPPED_STATUS = 77
SETTINGS = "programs.json"
# Keys of a program in programs.json. The first four are those of NVIDIA's samples.
KEYS = {
    "args", "runs", "skip", "min_gpus", "limit", "env", "status", "skipped_status", "variable", "unordered", "software",
    "version",
}  # fmt: skip


@dataclasses.dataclass
class Program:
    """A program, with the arguments of one of its runs."""

    name: str
    suite: str
    path: pathlib.Path
    # The folder that belongs to the program alone, or None.
    folder: pathlib.Path | None
    arguments: list
    settings: dict


def settings_of(folder, inherited):
    """Returns the settings that hold below a folder: its own, over those of the folders above."""
    try:
        own = json.loads((folder / SETTINGS).read_text())
    except FileNotFoundError:
        return inherited
    except ValueError as error:
        raise RuntimeError(f"{folder / SETTINGS}: {error}") from error
    for name, entry in own.items():
        if unknown := entry.keys() - KEYS:
            raise RuntimeError(f"{folder / SETTINGS}: {name}: unknown key {', '.join(sorted(unknown))}")
    return {**inherited, **own}


def executable(path):
    """Returns True for a program: a Python script, or an executable file that is no library."""
    return path.is_file() and (path.suffix == ".py" or os.access(path, os.X_OK) and ".so" not in path.suffixes)


def find(folder, inherited=None):
    """Yields the programs below a folder."""
    every = settings_of(folder, inherited or {})
    for path in sorted(folder.iterdir()):
        own = None
        if path.is_dir():
            own = path
            path = next((inner for inner in (own / own.name, own / f"{own.name}.py") if executable(inner)), None)
            if path is None:
                yield from find(own, every)
                continue
        elif not executable(path):
            continue
        settings = {**every.get("*", {}), **every.get(path.stem, {})}
        runs = settings.get("runs") or [settings]
        for number, run in enumerate(runs, 1):
            name = path.stem if number == 1 else f"{path.stem}#{number}"
            yield Program(name, folder.name, path, own, run.get("args", []), settings)


def checksums(folder):
    """Returns the checksum of each file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


class External:
    """Runs the programs of `args.folders`."""

    def __init__(self, args, runner, server, here):
        self.args, self.runner, self.server = args, runner, server
        self.folders = [folder.resolve() for folder in args.folders] or [here / "external"]
        self.work = args.out / "work"
        self.end, self.stopped, self.restarting = None, False, threading.Lock()
        # Results so far, which an interrupted run reports.
        self.entries = []

    def side(self, side, program, round_number=1):
        """Runs a program in a copy of its folder; returns result, files written, measurements."""
        if self.stopped:
            raise InterruptedError("interrupted")
        folder = self.work / f"{program.suite}-{program.name}-{side}-{round_number}"
        shutil.rmtree(folder, ignore_errors=True)
        if program.folder:
            shutil.copytree(program.folder, folder, symlinks=True)
        else:
            folder.mkdir(parents=True)
        before = checksums(folder)
        # Relative to the copy, since programs print their own path.
        path = program.path.relative_to(program.folder) if program.folder else program.path
        command = [f"./{path}" if program.folder else str(path)]
        if path.suffix == ".py":
            command = [self.args.python, str(path)]
        settings = program.settings
        limit = settings.get("limit", self.args.limit)
        result = self.runner.run(
            side, program.name, command + program.arguments, limit, env=settings.get("env"), cwd=folder
        )
        rules = settings.get("variable", {})
        lines = without_variable(result.lines(), rules, folder)
        if settings.get("unordered"):
            lines.sort()
        files = {name: sum_ for name, sum_ in checksums(folder).items() if before.get(name) != sum_}
        shutil.rmtree(folder, ignore_errors=True)
        return dataclasses.replace(result, out="\n".join(lines)), files, result.measurements()

    def varies(self, program, native, remote):
        """Returns how a second native run differs as the remote one does, or None."""
        again, files_again = self.side("native", program, 2)[:2]
        (native, files), (remote, remote_files) = native, remote
        if again.failure(program.settings.get("status", 0)):
            return None
        names = files.keys() | remote_files.keys()
        if any(files.get(name) == files_again.get(name) != remote_files.get(name) for name in names):
            return None
        how = same_shape(native.lines(), again.lines(), remote.lines())
        return "its files differ from one native run to the next" if how == "" else how

    def compare(self, program):
        """Runs a program on both sides; returns its entry of the result."""
        settings = program.settings
        entry = {"name": program.name, "suite": program.suite, "software": settings.get("software", program.suite)}
        entry["version"] = settings.get("version", "")
        if settings.get("skip"):
            reason = settings["skip"]
            return {**entry, "verdict": "skipped", "why": reason if isinstance(reason, str) else f"{SETTINGS} says so"}
        if settings.get("min_gpus", 1) > self.args.gpus:
            return {**entry, "verdict": "skipped", "why": f"needs {settings['min_gpus']} GPUs"}
        if self.end is not None and time.monotonic() > self.end:
            return {**entry, "verdict": "skipped", "why": "the budget of time is spent"}
        native, files, measured = self.side("native", program)
        if "version" in measured:
            entry["version"], entry["software"] = measured["version"]
        entry["native_s"] = round(native.wall, 3)
        if native.status in (SKIPPED_STATUS, settings.get("skipped_status")):
            said = [line for line in native.out.splitlines() if line.strip()]
            return {**entry, "verdict": "skipped", "why": said[-1][:200] if said else f"exit status {native.status}"}
        if native.killed:
            return {**entry, "verdict": "native failed", "why": native.killed}
        remote, remote_files, _ = self.side("remote", program)
        entry["remote_s"] = round(remote.wall, 3)
        entry["ratio"] = round(remote.wall / native.wall, 3) if native.wall else None
        expected = settings.get("status", 0)
        verdict, why = judge("exact", native, remote, expected)
        if verdict == "ok" and files != remote_files:
            names = sorted(name for name in files.keys() | remote_files.keys() if files.get(name) != remote_files.get(name))
            verdict, why = "DIFFERS", f"the program writes other files: {', '.join(names)[:160]}"
        if verdict == "DIFFERS" and not why.startswith("standard error"):
            if vary := self.varies(program, (native, files), (remote, remote_files)):
                verdict, why = "varies", vary
        with self.restarting:
            if not self.server.alive():
                verdict, why = "FAILED", "the server exited; " + why
                self.server.start()
        return {**entry, "verdict": verdict, "why": why}

    def run(self):
        """Runs all programs; returns their entries, which are in `entries` at any time."""
        check_rules()
        for folder in self.folders:
            if not folder.is_dir():
                raise RuntimeError(f"external: {folder}: not a folder; ./run external FOLDER takes folders with programs")
        programs = [
            program
            for folder in self.folders
            for program in find(folder)
            if wanted(self.args, program.name, program.name.partition("#")[0], program.suite)
        ]
        self.end = time.monotonic() + self.args.budget if self.args.budget else None

        def one(program):
            try:
                entry = self.compare(program)
            except (OSError, ValueError) as error:
                entry = {"name": program.name, "suite": program.suite, "software": program.suite, "version": ""}
                entry.update(verdict="FAILED", why=f"{type(error).__name__}: {error}")
            if self.stopped:
                return
            times = "".join(f"{entry[key]:7.2f} s " if key in entry else f"{'':10}" for key in ("native_s", "remote_s"))
            progress(f"  {entry['name']:34} {entry['verdict']:14} {times} {entry['why']}")
            self.entries.append(entry)

        pool = concurrent.futures.ThreadPoolExecutor(self.args.jobs or 1)
        try:
            for done in [pool.submit(one, program) for program in programs]:
                done.result()
        except KeyboardInterrupt:
            self.stopped = True
            self.runner.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            shutil.rmtree(self.work, ignore_errors=True)
        return self.entries


def good(entries):
    """Returns True if programs were compared, and none is worse remotely."""
    verdicts = [entry["verdict"] for entry in entries]
    return any(verdict in ("ok", "varies") for verdict in verdicts) and not {"FAILED", "DIFFERS"} & set(verdicts)


def summary(entries):
    """Prints the numbers, and each program that is not as natively."""
    count = {}
    for entry in entries:
        count[entry["verdict"]] = count.get(entry["verdict"], 0) + 1
    print(f"\nExternal programs: {', '.join(f'{number} {verdict}' for verdict, number in sorted(count.items())) or 'none'}")
    for entry in entries:
        if entry["verdict"] != "ok":
            print(f"  {entry['name']:34} {entry['verdict']:14} {entry['why']}")


def cell(text):
    """Returns a text as it may stand in a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(entries, machine):
    """Returns the results as Markdown, for docs/compatibility.md."""
    groups = {}
    for entry in entries:
        groups.setdefault((entry["software"], entry["version"]), []).append(entry)
    lines = [
        f"{', '.join(machine['gpus']) or 'no GPU found'}, {time.strftime('%Y-%m-%d', time.gmtime())}.",
        "",
        "| software | version | programs | as natively | fail natively | skipped | not as natively | remote / native |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (software, version), some in sorted(groups.items()):
        number = lambda *verdicts: sum(entry["verdict"] in verdicts for entry in some)  # noqa: E731
        ratios = [entry["ratio"] for entry in some if entry.get("ratio") and entry["verdict"] in ("ok", "varies")]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
        numbers = len(some), number("ok", "varies"), number("native failed"), number("skipped"), number("FAILED", "DIFFERS")
        lines.append(f"| {cell(software)} | {cell(version) or '–'} | {' | '.join(map(str, numbers))} | {ratio} |")
    others = [entry for entry in entries if entry["verdict"] != "ok"]
    if others:
        lines += ["", "| program | natively | remotely | result | reason |", "|---|---|---|---|---|"]
    for entry in others:
        times = [f"{entry[key]:.2f} s" if key in entry else "–" for key in ("native_s", "remote_s")]
        why = cell(entry["why"])
        lines.append(f"| `{entry['name']}` | {' | '.join(times)} | {entry['verdict']} | {f'`{why}`' if why else ''} |")
    return "\n".join(lines) + "\n"
