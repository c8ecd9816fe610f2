"""`./run nvidia-smi`: compares native and remote facts, and checks the lease's memory."""

import csv
import io

# Facts of the card, which have to be equal.
FACTS = [
    "name", "uuid", "pci.bus_id", "driver_version", "vbios_version", "compute_cap", "compute_mode", "ecc.mode.current",
    "persistence_mode", "mig.mode.current", "power.limit", "power.max_limit", "clocks.max.sm", "clocks.max.memory",
    "pcie.link.gen.max", "pcie.link.width.max",
]
# Readings, with the tolerance to the native value; remotely present if they are natively.
READINGS = {"temperature.gpu": 10, "power.draw": 200, "clocks.sm": 3000, "utilization.gpu": 100, "utilization.memory": 100}
# Whole pages, which have to succeed remotely if they do natively.
PAGES = [[], ["-L"], ["-q"], ["topo", "-m"], ["dmon", "-c", "1"], ["pmon", "-c", "1"]]


def table(text):
    """Returns the rows of a --format=csv answer."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]
    return [dict(zip(rows[0], row)) for row in rows[1:]] if rows else []


def number(text):
    """Returns the number before a unit, or None."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def check(runner, smi):
    """Runs all checks; returns a list of {name, verdict, why}."""
    results = []

    def say(name, why):
        results.append({"name": name, "verdict": "wrong" if why else "ok", "why": why})
        print(f"  nvidia-smi {name}: {why or 'ok'}", flush=True)

    def both(name, arguments):
        return [runner.run(side, f"smi-{name}", [*smi, *arguments], 60) for side in ("native", "remote")]

    def query(fields):
        native, remote = both("query", [f"--query-gpu={','.join(fields)}", "--format=csv"])
        if native.status or remote.status:
            return None, None, f"exit status {native.status} native, {remote.status} remote: {remote.out} {remote.err}"
        rows = table(native.out), table(remote.out)
        return (*rows, None if rows[0] and rows[1] else "no GPU in the answer")

    native, remote, why = query(["uuid", *FACTS])
    if why is None:
        whole = {row["uuid"]: row for row in native}
        for row in remote:
            other = whole.get(row["uuid"], {})
            # Text in brackets is the reason for a missing value.
            told = [key for key in row if not other.get(key, "").startswith("[")]
            differ = [f"{key} {other.get(key)!r} native, {row[key]!r} remote" for key in told if other.get(key) != row[key]]
            why = why or "; ".join(differ) or None
    say("facts", why)

    native, remote, why = query(["uuid", *READINGS])
    if why is None:
        whole = {row["uuid"]: row for row in native}
        for row in remote:
            for key, value in row.items():
                there, here = number(whole.get(row["uuid"], {}).get(key, "")), number(value)
                limit = next((limit for name, limit in READINGS.items() if key.startswith(name) or name == key.split(" ")[0]), None)
                if there is not None and (here is None or limit is not None and abs(here - there) > limit):
                    why = f"{key}: {there} native, {value} remote"
    say("readings", why)

    native, remote, why = query(["uuid", "memory.total", "memory.used", "memory.free"])
    if why is None:
        total = {row["uuid"]: number(row["memory.total [MiB]"]) for row in native}
        for row in remote:
            mine, used, free = (number(row[f"memory.{what} [MiB]"]) for what in ("total", "used", "free"))
            if not 0 < mine <= total[row["uuid"]] or abs(mine - used - free) > 2:
                why = f"a lease of {mine} MiB with {used} used and {free} free on a card of {total[row['uuid']]} MiB"
    say("memory", why)

    for page in PAGES:
        native, remote = both("-".join(page) or "default", page)
        why = None
        if native.status == 0 and remote.status != 0 or remote.killed:
            why = f"exit status {remote.status}, native {native.status}: {(remote.out + remote.err)[-300:].strip()}"
        say(" ".join(page) or "(no arguments)", why)

    refused = runner.run("remote", "smi-pm", [*smi, "-pm", "0"], 60)
    # nvidia-smi of 580 prints the refusal and continues with the next option; earlier ones exit
    # with an error.
    say("-pm 0", None if "Permission" in refused.out + refused.err else f"not refused: {refused.out}")
    quick = min(runner.run("remote", "smi-time", [*smi, "-L"], 60).wall for _ in range(3))
    print(f"  nvidia-smi -L takes {quick * 1000:.0f} ms", flush=True)
    return results
