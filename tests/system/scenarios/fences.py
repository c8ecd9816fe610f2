"""Bounds of a worker's host memory, threads and processor time, and where a program meets them."""
import json

from harness import Failed, expect

ORDER = 47
GROUP = "restarts"
CONTROL_GROUP = "/sys/fs/cgroup/system.slice/gpuserver-worker.service"


def rows(server):
    return json.loads(server.ok("gpuserver ps --json"))["workers"]


def serving(site):
    """Returns the server of the machine's lease."""
    for server in site.servers:
        if json.loads(server.run("gpuserver leases --json 2>/dev/null").out or "{}").get("leases"):
            return server
    raise Failed("no server has a lease")


def run(site, check):
    client, server = site.client, serving(site)
    version = int(server.ok("systemctl --version").split()[1])
    unified = not server.run("test -e /sys/fs/cgroup/cgroup.controllers").code
    # The lab may have no controllers to give.
    has = server.run(f"cat {CONTROL_GROUP}/cgroup.controllers").out.split()
    bounded = version >= 254 and unified and {"memory", "pids"} <= set(has)
    with check("status shows how the server keeps the limits of memory") as note:
        seen = next(line.strip() for line in server.ok("gpuserver status").splitlines() if "memory limits" in line)
        expect(seen, "memory limits: control groups" if bounded else "memory limits: sampled (")
        note(f"{seen}; systemd {version}")
    if bounded:
        with check("each worker has a control group with its bounds, and the server one without"):
            client.start("long", "longRun 60", user="alice")
            server.until("gpuserver ps --json | grep -q longRun", 20)
            for row in rows(server):
                path = server.ok(f"sed -n 's/^0:://p' /proc/{row['pid']}/cgroup")
                assert path.endswith(f"/worker-{row['worker']}"), path
                bounds = [server.ok(f"cat /sys/fs/cgroup{path}/{name}") for name in ("memory.max", "pids.max", "memory.swap.max")]
                assert bounds[0] != "max" and bounds[1] == "1024" and bounds[2] == "0", bounds
            pid = server.ok("systemctl show -P MainPID gpuserver")
            assert server.ok(f"sed -n 's/^0:://p' /proc/{pid}/cgroup").endswith("/gpuserver.service/server")
        with check("a restart keeps the workers and their groups"):
            before = {row["worker"]: row["pid"] for row in rows(server) if row["program"]}
            server.ok("systemctl restart gpuserver")
            server.until("gpuserver status", 20)
            after = {row["worker"]: row["pid"] for row in rows(server) if row["program"]}
            assert before and before.items() <= after.items(), f"{before} {after}"
            client.ok("systemctl stop long")
        with check("groups of ended workers are removed"):
            server.until(f"test $(find {CONTROL_GROUP} -name 'worker-*' | wc -l) = $(gpuserver ps --json | grep -o worker.: | wc -l)", 20)
    with check("a program whose worker exceeds a limit ends alone, and the journal names the limit"):
        client.start("hers", "longRun 15; echo status $?", user="alice")
        client.start("his", "longRun 60; echo status $?", user="bob")
        server.until("test $(gpuserver ps --json | grep -o longRun | wc -l) -ge 2", 20)
        server.ok("gpuserver config set limits.user.bob.threads 1")
        try:
            his = client.until("grep status /run/his.out && cat /run/his.out", 30)
            assert "status 0" not in his, his
            told = server.ok("journalctl -u gpuserver -o cat --no-pager --since -2min")
            expect(told, "limit threads = 1 of user bob")
        finally:
            server.ok("gpuserver config unset limits.user.bob.threads")
        expect(client.until("grep status /run/hers.out && cat /run/hers.out", 60), "status 0")
