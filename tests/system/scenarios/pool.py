"""Two servers of one pool: a client that joined one uses both; a lost server's lease moves."""
from harness import expect
from scenarios.policy import lease

ORDER = 48
GROUP = "faults"
BOTH = '''[[server]]
address = "gpu1"
[[server]]
address = "gpu2"
'''
SECOND = '[[lease]]\nname = "second"\nmemory = "10%"\nserver = "gpu2"\n'
ONE = '[[server]]\naddress = "gpu1"\n'


def run(site, check):
    client, (first, second) = site.client, site.servers
    with check("a second server of the pool, once configured, accepts the client without another join"):
        before = lease(client, "everyone")
        second.ok("systemctl start gpuserver")
        client.write("/etc/gpusession/servers.toml", BOTH)
        client.ok("systemctl reload gpusession")
        client.until("gpusession status --json | grep -q gpu2", 20)
        assert lease(client, "everyone") == before, "the lease stays where it is"
        second.until("gpuserver clients | grep client", 20)
    with check("with a lease on each server, a program sees the GPUs of both, copies between them, and may select some"):
        client.push([site.programs / "multiDevice"], "/usr/local/bin")
        client.write("/etc/gpusession/conf.d/second.toml", SECOND)
        client.ok("systemctl reload gpusession")
        client.until("gpusession status | grep -q 'second  *ready.* on gpu2'", 20)
        expect(client.ok("ssh alice@client multiDevice"), "3 device(s) right")
        expect(client.ok("ssh alice@client CUDA_VISIBLE_DEVICES=2,0 multiDevice"), "2 device(s) right")
        client.ok("rm /etc/gpusession/conf.d/second.toml; systemctl reload gpusession")
        client.until("! gpusession status | grep -q second", 20)
        expect(client.ok("ssh alice@client multiDevice"), "2 device(s) right")
    with check("with its server down for a minute, the lease is granted again on the other server, and a program runs there"):
        first.ok("systemctl stop gpuserver")
        client.until(f"! gpusession list --json | grep -q {before} && gpusession status | grep -q 'is ready'", 90)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        second.until("gpuserver accounting | grep vectorAdd", 10)
        expect(second.ok("gpuserver accounting --csv --kind process"), ",/usr/local/bin/vectorAdd")
    with check("a client revoked by one server uses the other server"):
        first.ok("systemctl start gpuserver")
        first.until("gpuserver status", 20)
        # Leases from before the stop are released, or expire.
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
