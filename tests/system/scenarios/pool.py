"""Two servers of one pool: a client that joined with one of them uses both, also in one program, and a lease moves when its server is lost."""
from harness import expect
from scenarios.policy import lease

ORDER = 48
BOTH = '''[[server]]
address = "gpu1"
[[server]]
address = "gpu2"
'''
SECOND = '[[lease]]\nname = "second"\nmemory = "10%"\nserver = "gpu2"\n'
ONE = '[[server]]\naddress = "gpu1"\n'


def run(site, check):
    client, (first, second) = site.client, site.servers
    with check("a second server of the pool is named, and knows the client without another join"):
        before = lease(client, "everyone")
        second.ok("systemctl start gpuserver")
        client.write("/etc/gpusession/servers.toml", BOTH)
        client.ok("systemctl reload gpusession")
        client.until("gpusession status --json | grep -q gpu2", 20)
        assert lease(client, "everyone") == before, "nothing moves that need not"
        second.until("gpuserver clients | grep client", 20)
    with check("a lease on each of them: a program sees the GPUs of both, copies between them, and may choose"):
        client.push([site.programs / "multiDevice"], "/usr/local/bin")
        client.write("/etc/gpusession/conf.d/second.toml", SECOND)
        client.ok("systemctl reload gpusession")
        client.until("gpusession status | grep -q 'second  *ready.* on gpu2'", 20)
        expect(client.ok("ssh alice@client multiDevice"), "3 device(s) right")
        expect(client.ok("ssh alice@client CUDA_VISIBLE_DEVICES=2,0 multiDevice"), "2 device(s) right")
        client.ok("rm /etc/gpusession/conf.d/second.toml; systemctl reload gpusession")
        client.until("! gpusession status | grep -q second", 20)
        expect(client.ok("ssh alice@client multiDevice"), "2 device(s) right")
    with check("its server is gone for a minute: the lease is had again on the other one, and a program runs there"):
        first.ok("systemctl stop gpuserver")
        client.until(f"! gpusession list --json | grep -q {before} && gpusession status | grep -q 'is ready'", 90)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        second.until("gpuserver accounting | grep vectorAdd", 10)
        expect(second.ok("gpuserver accounting --csv --kind process"), ",/usr/local/bin/vectorAdd")
    with check("a client that one server has revoked goes to the other one"):
        first.ok("systemctl start gpuserver")
        first.until("gpuserver status", 20)
        # What it held before it stopped is given back, or ends for want of renewals.
        first.until("! gpuserver leases | grep client", 80)
        before = lease(client, "everyone")
        second.ok("gpuserver clients revoke client")
        client.until(f"! gpusession list --json | grep -q {before} && " +
                     "gpusession status | grep -q 'is ready'", 40)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        first.until("gpuserver leases | grep client", 10)
    second.ok("systemctl stop gpuserver")
    client.write("/etc/gpusession/servers.toml", ONE)
    client.ok("systemctl reload gpusession")
    client.until("gpusession status | grep -q 'is ready'", 40)
