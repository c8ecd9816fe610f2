"""81 boot leases on 80 GPUs: an unused lease lends its GPU, and gets one again when it is used."""
import json

from harness import Host, expect

ORDER = 55
GPUS = 80
# Half of all leases, and one more: a client may have 64 at most.
MACHINES = {"half1": 41, "half2": 40}
SERVER = """
warm_workers = 0
lend_after = 0
[limits]
max_persistent = 64
"""


def run(site, check):
    server, clients = Host("many"), [Host(name) for name in MACHINES]

    def leases():
        return json.loads(server.ok("gpuserver leases --json"))["leases"]

    def lent():
        return [l for l in leases() if l["state"] == "lent"]

    def runs(client, lease):
        expect(client.ok(f"ssh alice@{client.name} GPUSESSION_LEASE={lease} vectorAdd", timeout=60), "sums right")

    with check(f"a server with {GPUS} simulated GPUs, and two machines"):
        site.boot("many", *MACHINES)
        site.install_server(server, devices=GPUS)
        server.write("/etc/gpusession/gpuserver.d/10-eighty.toml", SERVER)
        server.ok("gpuserver pool init && systemctl start gpuserver || { journalctl -u gpuserver -n 20 --no-pager; false; }")
        server.until("gpuserver status", 20)
        assert len(json.loads(server.ok("gpuserver gpus --json"))["gpus"]) == GPUS
        for client in clients:
            site.install_client(client)
            count = MACHINES[client.name]
            client.write("/etc/gpusession/conf.d/lease.toml", "".join(f'[[lease]]\nname = "l{n}"\n' for n in range(count)))
            client.ok(f"gpusession join many {server.ok('gpuserver token create 2>/dev/null')}")
    with check("both machines boot with a GPU for each lease, except the last one, which waits"):
        clients[0].ok("systemctl enable --now gpusession")
        clients[0].until("gpusession status | grep -q 'is ready: 41 GPU'", 60)
        clients[1].ok("systemctl enable --now gpusession")
        clients[1].until("gpusession status | grep -q '39 of 40 GPU(s) leased'", 60)
        expect(clients[1].until("gpusession status | grep waits:", 20), "position 1 of 1")
        held = leases()
        assert len(held) == GPUS and len({l["devices"][0]["uuid"] for l in held}) == GPUS, held
    with check("an unused lease lends its GPU to the waiting one, and no lease is lost"):
        server.ok("gpuserver config set lend_after 1s")
        clients[1].until("gpusession status | grep -q 'is ready: 40 GPU'", 60)
        assert len(leases()) == GPUS + 1
        lender = lent()
        assert len(lender) == 1, lender
    with check("programs run on any lease, including the lent one: it reacquires a GPU, and another lease lends its own"):
        home = next(c for c in clients if c.name == lender[0]["client"])
        runs(home, lender[0]["lease"])
        server.until("gpuserver leases --json | grep -c '\"lent\"' | grep -qx 1", 20)
        after = lent()
        assert [l["lease"] for l in after] != [lender[0]["lease"]], after
        used = [l["devices"][0]["uuid"] for l in leases() if l["state"] != "lent"]
        assert len(used) == GPUS and len(set(used)) == GPUS, used
        for l in (leases()[n] for n in (0, 40, 80)):
            runs(next(c for c in clients if c.name == l["client"]), l["lease"])
    with check("when a lease is given back, every other one has its GPU at its next use"):
        clients[1].ok("systemctl stop gpusession")
        for l in lent():
            runs(clients[0], l["lease"])
        assert len(leases()) == 41 and not lent(), lent()
    for host in (*clients, server):
        host.lab("down")
