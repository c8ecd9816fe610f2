"""A second machine with a copied identity is refused, and the first machine keeps its GPUs."""
from harness import Host, expect

ORDER = 48
GROUP = "faults"
# As described in docs/admin-guide.md.
ENCRYPT = """mkdir -p /etc/credstore.encrypted
systemd-creds encrypt --with-key=host --name=gpusession.token /root/token /etc/credstore.encrypted/gpusession.token && rm /root/token"""
DROP_IN = "[Service]\nLoadCredential=\nLoadCredentialEncrypted=gpusession.token\n"


def run(site, check):
    client, copy = site.client, Host("copy")
    site.boot("copy")
    with check("the copy of a machine gets no GPU"):
        site.install_client(copy)
        copy.ok("systemctl stop gpusession")
        data = client.ok("tar -C / -cz var/lib/gpusession etc/gpusession | base64 -w0")
        copy.ok("base64 -d | tar -C / -xz && chown -R gpusession: /var/lib/gpusession", stdin=data)
        copy.ok("systemctl start gpusession")
        expect(copy.until("gpusession status | grep -i 'another machine'", 20), "another machine")
        copy.fails("ssh alice@copy vectorAdd")
    with check("the original machine still has its GPU"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("without the identity, and with an encrypted token on its disk, the copy joins as a machine of its own"):
        expect(copy.fails("gpusession leave --for-template"), "the daemon is running")
        copy.ok("systemctl stop gpusession && gpusession leave --for-template && test ! -e /var/lib/gpusession/identity")
        copy.write("/root/token", site.servers[0].ok("gpuserver token create --name 'copy' 2>/dev/null"), "600")
        copy.ok(ENCRYPT)
        copy.write("/etc/systemd/system/gpusession.service.d/token.conf", DROP_IN)
        copy.ok("systemctl daemon-reload")
        copy.write("/etc/gpusession/conf.d/lease.toml", '[[lease]]\nmemory = "20%"\n')
        copy.ok("systemctl start gpusession")
        copy.until("gpusession status | grep -q 'is ready'", 30)
        expect(copy.ok("ssh alice@copy vectorAdd"), "sums right")
        expect(site.servers[0].ok("gpuserver clients"), "copy")
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    copy.lab("down")
