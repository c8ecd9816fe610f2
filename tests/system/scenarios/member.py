"""A server without the key of its pool: it joins, serves, and outlives its issuer."""
import re

from harness import expect
from scenarios.instance import CONFIG

ORDER = 59
GROUP = "hosts"
UNIT = "gpuserver@green"
FILE = "/etc/gpusession/gpuserver-green.toml"
SERVER = f"gpuserver --config {FILE}"
RUN = "gpusession run --server gpu2:7611 -n 1 -m 30% --"


def run(site, check):
    client, (issuer, host) = site.client, site.servers

    def join(token):
        return client.run("su -l alice -c 'gpusession join gpu2:7611 --name alice' 2>&1", stdin=token)

    with check("a server joins the pool with a token of root on the issuer, and starts"):
        host.write("/etc/systemd/system/gpuserver@.service.d/simulated.conf", "[Service]\nEnvironment=SIMGPU_DEVICES=2 SIMGPU_ALL_USERS=1\n")
        host.write(FILE, CONFIG.replace('"blue"', '"green"'))
        host.ok("systemctl daemon-reload")
        token = issuer.ok("gpuserver pool admit green 2>/dev/null")
        expect(issuer.ok("gpuserver token list"), "server green")
        expect(host.ok(f"{SERVER} pool join --now gpu1", stdin=token), "is a member of the pool")
        host.until(f"{SERVER} status", 20)
        assert host.ok("stat -c '%U %a' /var/lib/gpuserver-green/member.json") == "gpuserver 600"
        host.fails("ls /var/lib/gpuserver-ca-green/authority.key")
        issuer.ok("journalctl -u gpuserver-ca | grep 'signed for server green'")
        expect(issuer.ok("gpuserver audit --event server-join"), "green")
        expect(host.run(f"{SERVER} pool join gpu1 2>&1", stdin=token).out, "member.json")
        expect(issuer.run("gpuserver pool join gpu2 2>&1", stdin=token).out, "a running gpuserver uses /var/lib/gpuserver")
    with check("alice joins through it with a token of the issuer, and runs a program on it"):
        joined = join(issuer.ok("gpuserver token create --name alice 2>/dev/null"))
        assert not joined.code, joined.out
        expect(client.ok(f"ssh alice@client {RUN} vectorAdd"), "sums right")
        expect(host.run(f"{SERVER} token create 2>&1").out, "no issuer: run it on gpu1")
    with check("while the issuer is away it serves alice, also after a restart, and a join fails with the issuer's name"):
        unused = issuer.ok("gpuserver token create --name other 2>/dev/null")
        issuer.ok("systemctl stop gpuserver")
        host.ok(f"systemctl restart {UNIT}")
        host.until(f"{SERVER} status", 20)
        expect(client.ok(f"ssh alice@client {RUN} vectorAdd"), "sums right")
        other = client.run("su -l bob -c 'gpusession join gpu2:7611 --name other' 2>&1", stdin=unused)
        assert other.code and re.search("no issuer of the pool answers: gpu1", other.out), other.out
        host.until(f"{SERVER} status | grep 'no issuer of the pool answers'", 45)
        issuer.ok("systemctl start gpuserver")
        issuer.until("gpuserver status", 20)
        host.until(f"! {SERVER} status | grep 'no issuer of the pool answers'", 45)
    with check("once revoked, it gets no signature, and alice's programs leave it"):
        issuer.ok("gpuserver pool revoke green")
        said = join(issuer.ok("gpuserver token create --name alice 2>/dev/null"))
        assert said.code, said.out
    host.ok(f"systemctl disable --now {UNIT}; rm -rf {FILE} /var/lib/gpuserver-green /var/lib/gpuserver-ca-green")
    client.ok("su -l alice -c 'rm -rf ~/.config/gpusession'")
