"""While a program is cut off from its worker, the server parks, drains, or ends its lease."""
import time

from harness import expect
from scenarios.policy import lease

ORDER = 51
GROUP = "users"


def run(site, check):
    client = site.client
    held = lease(client, "everyone")
    assert held, "the machine has no lease"
    server = next(host for host in site.servers if held in host.run("gpuserver leases").out)

    def cut_off(seconds):
        client.start("program", f"longRun {seconds}; echo status $?", user="alice")
        server.until("gpuserver ps | grep longRun", 20)
        server.lab("cut", "--silent")
        client.until("gpusession status | grep -q 'has no connection to'", 30)

    def result():
        return client.until("grep status /run/program.out && cat /run/program.out", 60)

    try:
        checks(client, server, cut_off, result, check)
    finally:
        server.lab("heal")
        server.run("gpuserver drain --end")


def checks(client, server, cut_off, result, check):
    with check("its lease is parked, and the server drains: it computes right when the network is back"):
        cut_off(8)
        expect(server.ok(f"gpuserver park {lease(client, 'everyone')}"), "is parked")
        expect(server.ok("gpuserver drain"), "still running: longRun")
        expect(server.ok("gpuserver ps"), "parked")
        server.lab("heal")
        seen = result()
        expect(seen, "steps right")
        expect(seen, "status 0")
        server.ok("gpuserver drain --end")
    with check("an administrator ends its lease: it fails at once when the network is back, and the next program has GPUs") as note:
        cut_off(30)
        before = lease(client, "everyone")
        server.ok(f"gpuserver kill {before}")
        server.lab("heal")
        begin = time.monotonic()
        expect(result(), "cudaErrorDevicesUnavailable")
        note(f"after {time.monotonic() - begin:.1f} s")
        assert time.monotonic() - begin < 15
        client.until("gpusession status | grep -q 'is ready'", 30)
        assert lease(client, "everyone") != before, "the same lease"
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
