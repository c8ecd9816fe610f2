"""`netperf` measures what a program's copies reach, on the hosts' link and on one of 100 us."""
import contextlib
import json
import pathlib

from harness import Failed

ORDER = 39
GROUP = "faults"
# Copies pinned memory in each direction for two seconds, and prints bytes a second.
PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "gpu/copy_rates.py"
MEASURE = "gpusession netperf --seconds 3 --json"


def copies(client):
    return json.loads(client.ok("python3 /root/copies.py", timeout=120).splitlines()[-1])


def compare(client, note, least, most):
    """Compares netperf with a program, three times at most: other work may slow either of them."""
    for _ in range(2):
        with contextlib.suppress(Failed):
            return compared(client, note, least, most)
    return compared(client, note, least, most)


def compared(client, note, least, most):
    """Compares netperf with a program before and after it."""
    before = copies(client)
    # A machine may measure once a minute, also after a restart of the server.
    client.until(f"{MEASURE} >/root/netperf.json; test $? = 0", 90)
    runs = json.loads(client.ok("cat /root/netperf.json"))
    series = next(run for run in runs["runs"] if (run["encrypted"], run["lanes"]) == (runs["programs"]["encrypted"], runs["programs"]["lanes"]))
    after = copies(client)
    for way in ("to_server", "from_server"):
        rate, slow, fast = series[way]["bytes_per_s"], *sorted((before[way], after[way]))
        note(f"{way} {rate / 1e6:.0f} MB/s, a program {slow / 1e6:.0f} to {fast / 1e6:.0f} MB/s")
        if not least * slow <= rate <= most * fast:
            raise Failed(f"{way}: netperf has {rate / 1e6:.0f} MB/s, a program {slow / 1e6:.0f} to {fast / 1e6:.0f} MB/s")
    return series


def run(site, check):
    client = site.client
    client.write("/root/copies.py", PROGRAM.read_text())
    with check("between the hosts, where processors limit both") as note:
        compare(client, note, 0.5, 2)
    client.lab("netem", "delay", "0.05", "rate", "80")
    try:
        with check("over a link of 100 us and 80 Mbit/s, netperf is within a tenth of a program's copies") as note:
            series = compare(client, note, 0.9, 1.1)
            note(f"limits: {series['to_server']['limit']}, {series['from_server']['limit']}")
    finally:
        client.lab("netem", "clear")
