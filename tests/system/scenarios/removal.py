"""Removal while programs run: it prints how many lose their GPUs, waits a while, then ends them."""
from harness import CLIENT_PACKAGES, expect
from scenarios.policy import lease

ORDER = 87
GROUP = "hosts"
REMOVE = "dpkg -r " + " ".join(CLIENT_PACKAGES) + " 2>&1"
SAYS = "1 running program(s) lose their GPUs"


def run(site, check):
    client = site.client
    server = next(host for host in site.servers if lease(client, "everyone") in host.run("gpuserver leases").out)

    def program(seconds):
        client.start("program", f"longRun {seconds}; echo status $?", user="alice")
        client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)

    def ended():
        return client.until("grep status /run/program.out && cat /run/program.out", 30)

    with check("removing the client's packages: a program that takes longer than the grace period loses its GPUs"):
        program(90)
        expect(client.ok(REMOVE, timeout=120), SAYS)
        expect(ended(), "cudaErrorDevicesUnavailable")
        server.until("gpuserver gpus | grep -c free | grep 2", 20)
    with check("afterwards no program of the packages runs, and logins still work"):
        client.fails("systemctl is-active gpusession.service gpusession.socket")
        client.fails("pgrep -u gpusession")
        expect(client.ok("ssh alice@client echo in"), "in")
    with check("installed again, the machine is still in the pool and has its GPUs"):
        client.install([site.deb(p) for p in CLIENT_PACKAGES])
        client.ok("systemctl enable --now gpusession")
        client.until("gpusession status | grep -q 'is ready'", 30)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("removing the server's package prints how many programs of clients lose their GPUs, and drains them"):
        server.write("/etc/gpusession/gpuserver.d/zz-drain.toml", 'drain_timeout = "2s"\n')
        server.ok("systemctl reload gpuserver")
        program(90)
        expect(server.ok("dpkg -r gpuserver 2>&1", timeout=120), "1 running program(s) of clients lose their GPUs")
        expect(ended(), "cudaErrorDevicesUnavailable")
        server.fails("pgrep -u gpuserver,gpuserver-worker")
    with check("installed again, the server still has its pool and the client gets its GPUs"):
        server.ok("rm /etc/gpusession/gpuserver.d/zz-drain.toml")
        server.install([site.deb("gpuserver")])
        server.ok("systemctl start gpuserver")
        client.until("vectorAdd", 60, user="alice")
    with check("removing the client's packages: a shorter program finishes"):
        program(6)
        expect(client.ok(REMOVE, timeout=60), SAYS)
        expect(ended(), "steps right")
        expect(client.ok("ssh alice@client echo in"), "in")
    with check("the server has the GPUs back"):
        server.until("gpuserver gpus | grep -c free | grep 2", 20)
