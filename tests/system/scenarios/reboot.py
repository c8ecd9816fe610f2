"""Another boot of a machine trusts nothing of the one before: another lease, and what the old one left on a server ends."""
import json

from harness import Failed, expect
from scenarios.policy import lease

ORDER = 43
BOOT = "cat /proc/sys/kernel/random/boot_id"
SEEN = "nsenter -m -t $(systemctl show -P MainPID {}) " + BOOT
# b33b7a19...: a lease is over, with its reason.
OVER = "journalctl -b -t gpuserver MESSAGE_ID=b33b7a197cde42a497afb486369f74ce GPUSESSION_LEASE={} -o cat --no-pager"


def held(host):
    """Leases of this machine on a server, as {id: fencing token}; all that the server knows, whatever their state."""
    return {row["lease"]: row["fencing_token"] for row in json.loads(host.ok("gpuserver leases --json"))["leases"]}


def run(site, check):
    client = site.client
    server = next(host for host in site.servers if lease(client, "everyone") in (host.run("gpuserver leases").out))
    with check("each boot of each host has a boot id of its own, which its daemons see"):
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
            assert client.ok(BOOT) != boot, "the same boot id"
            after = lease(client, "everyone")
            if after == before:
                raise Failed(f"lease {before} of the boot before is used again")
            # Long before the server would give up a machine that stays silent, a minute later.
            server.until("".join(f"! kill -0 {pid} 2>/dev/null && " for pid in workers) + "true", 10, "workers of the old boot end")
            left = held(server)
            assert set(left) == {after} and left[after] > max(tokens.values()), f"{tokens} before, {left} now"
            server.until(OVER.format(before) + f" | grep '{reason}'", 10)
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")

    another("after a reboot, with a program until then: another lease", lambda: client.lab("reboot"), "released by its client")

    def power_loss():
        client.lab("kill")
        client.lab("start")
    # What the daemon had kept for another start of the same boot is still on disk then, and the server still holds the lease.
    another("after a power loss too, whose state is still on disk", power_loss, "the client was restarted")

    with check("after a power loss of the server its lease comes back, and programs that ran are told"):
        before = lease(client, "everyone")
        client.start("program", "longRun 60; echo status $?", user="alice")
        client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
        server.lab("kill")
        server.lab("start")
        server.ok("systemctl start gpuserver")
        expect(client.until("grep status /run/program.out && cat /run/program.out", 30), "cudaErrorDevicesUnavailable")
        client.until("vectorAdd", 30, user="alice")
        assert set(held(server)) == {lease(client, "everyone")}, f"{before} before, {held(server)} now"
