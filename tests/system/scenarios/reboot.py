"""After a reboot a machine gets another lease; servers end leases and workers of the old boot."""
import json

from harness import Failed, expect
from scenarios.policy import lease

ORDER = 43
GROUP = "restarts"
BOOT = "cat /proc/sys/kernel/random/boot_id"
SEEN = "nsenter -m -t $(systemctl show -P MainPID {}) " + BOOT
# b33b7a19...: message id for the end of a lease, with its reason.
OVER = "journalctl -b -t gpuserver MESSAGE_ID=b33b7a197cde42a497afb486369f74ce GPUSESSION_LEASE={} -o cat --no-pager"


def held(host):
    """Returns all leases that a server knows, in any state, as {id: fencing token}."""
    return {row["lease"]: row["fencing_token"] for row in json.loads(host.ok("gpuserver leases --json"))["leases"]}


def run(site, check):
    client = site.client
    server = next(host for host in site.servers if lease(client, "everyone") in (host.run("gpuserver leases").out))
    with check("each boot of each host has its own boot id, which its daemons see"):
        ids = [client.ok(BOOT), client.ok(SEEN.format("gpusession")), server.ok(BOOT), server.ok(SEEN.format("gpuserver"))]
        assert ids[0] == ids[1] != ids[2] == ids[3], ids

    def another(what, cause, reason):
        with check(what):
            before, tokens, boot = lease(client, "everyone"), held(server), client.ok(BOOT)
            client.start("program", "longRun 60", user="alice")
            client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
            workers = [row["pid"] for row in json.loads(server.ok("gpuserver ps --json"))["workers"] if row["lease"] == before]
            cause()
            client.until("gpusession status | grep -q 'is ready'", 20)
            assert client.ok(BOOT) != boot, "boot ids repeat"
            after = lease(client, "everyone")
            if after == before:
                raise Failed(f"lease {before} of the previous boot is used again")
            # The bound is far below the minute after which the server gives up a silent machine.
            server.until("".join(f"! kill -0 {pid} 2>/dev/null && " for pid in workers) + "true", 10, "workers of the old boot end")
            left = held(server)
            assert set(left) == {after} and left[after] > max(tokens.values()), f"{tokens} before, {left} now"
            server.until(OVER.format(before) + f" | grep '{reason}'", 10)
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")

    another("after a reboot that ends a running program, the machine gets another lease", lambda: client.lab("reboot"), "released by its client")

    def power_loss():
        client.lab("kill")
        client.lab("start")
    # The daemon's state for another start in the same boot is still on disk, and the server still
    # holds the lease.
    another("likewise after a power loss, with the old state still on disk", power_loss, "the client was restarted")

    with check("after a power loss of the server its lease comes back, and running programs get an error"):
        before = lease(client, "everyone")
        client.start("program", "longRun 60; echo status $?", user="alice")
        client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
        server.lab("kill")
        server.lab("start")
        server.ok("systemctl start gpuserver")
        expect(client.until("grep status /run/program.out && cat /run/program.out", 30), "cudaErrorDevicesUnavailable")
        client.until("vectorAdd", 30, user="alice")
        assert set(held(server)) == {lease(client, "everyone")}, f"{before} before, {held(server)} now"
