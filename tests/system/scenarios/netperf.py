"""`netperf` measures what a program's copies reach, on the hosts' link and on one of 100 us."""
import contextlib
import json
import pathlib
import time

from harness import Failed, expect

ORDER = 39
GROUP = "faults"
# Copies pinned memory in each direction for two seconds, and prints bytes a second.
PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "gpu/copy_rates.py"
MEASURE = "gpusession netperf --seconds 3 --json"
ENDPOINT = "pgrep -f '[g]puserver-worker --measure'"


def measuring(site):
    """Returns the server that has an endpoint; a client measures once a minute."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        for server in site.servers:
            if not server.run(ENDPOINT).code:
                return server
    raise Failed("no server has an endpoint: " + site.client.ok("cat /run/measure.out"))


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
    with check("a measurement has a user of its own, without network, and ends with its client"):
        client.start("measure", MEASURE)
        server = measuring(site)
        pid = server.ok(ENDPOINT).strip()
        assert server.ok(f"ps -o user:32= -p {pid}").strip() == "gpuserver-worker"
        main = server.ok("systemctl show -P MainPID gpuserver").strip()
        net = server.ok(f"readlink /proc/{main}/ns/net /proc/{pid}/ns/net").split()
        assert net[0] != net[1], net
        expect(server.ok(f"cat /proc/{pid}/cgroup"), "/gpuserver-worker.service")
        # The lab may have no controllers to give.
        if "memory limits: control groups" in server.ok("gpuserver status"):
            group = "/sys/fs/cgroup" + server.ok(f"sed -n 's/^0:://p' /proc/{pid}/cgroup").strip()
            assert server.ok(f"cat {group}/memory.max {group}/pids.max").split() == [str(3 << 30), "256"], group
        client.until("! systemctl is-active measure", 90)
        assert json.loads(client.ok("cat /run/measure.out"))["runs"]
        server.until(f"! {ENDPOINT}", 10)
    with check("between the hosts, where processors limit both") as note:
        compare(client, note, 0.5, 2)
    client.lab("netem", "delay", "0.05", "rate", "80")
    try:
        with check("over a link of 100 us and 80 Mbit/s, netperf is within a tenth of a program's copies") as note:
            series = compare(client, note, 0.9, 1.1)
            note(f"limits: {series['to_server']['limit']}, {series['from_server']['limit']}")
    finally:
        client.lab("netem", "clear")
