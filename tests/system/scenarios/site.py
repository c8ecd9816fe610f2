"""From bare hosts to a program on a leased GPU: install, join by token, boot leases, login."""
import json

from harness import expect

ORDER = 10

CLIENT = """
[[lease]]
name = "everyone"
gpus = 2
memory = "50%"

[environment]
NCCL_DEBUG = "WARN"
HF_HOME = "/srv/models"
"""

AS_SERVER = "setpriv --reuid=gpuserver --regid=gpuserver --init-groups"
AS_STARTER = "setpriv --reuid=gpuserver-worker --regid=gpuserver-worker --init-groups"
# Prints the users of processes whose command line begins so.
USERS = "ps -e -o user:32=,args= | awk -v begin='{}' 'index($0, begin) {{ print $1 }}' | grep -v root"
# The state folder as versions without a signer left it.
EARLIER = """systemctl stop gpuserver-ca.socket gpuserver-ca.service
mkdir /var/lib/gpuserver/ca && mv /var/lib/gpuserver-ca/authority.* /var/lib/gpuserver/ca
mv /var/lib/gpuserver-ca/tokens.json /var/lib/gpuserver && rm -r /var/lib/gpuserver-ca
chown -R gpuserver: /var/lib/gpuserver"""


def run(site, check):
    client, servers = site.client, site.servers
    with check("three hosts boot"):
        site.boot("client", "gpu1", "gpu2")
    # A shell that alice started before the installation. Its check, "a shell older than the
    # installation", belongs to `login`, but this site is rebooted below.
    client.push([site.programs / "vectorAdd"], "/usr/local/bin")
    client.start("older", "until [ -e /tmp/go ]; do sleep 0.1; done; vectorAdd; echo status $?", user="alice")
    with check("packages install on both servers"):
        for server in servers:
            site.install_server(server)
    with check("packages install on the client"):
        site.install_client(client)
    with check("one server is the authority of a pool and runs"):
        servers[0].ok("gpuserver pool init")
        servers[0].ok("systemctl start gpuserver && systemctl is-active gpuserver || { journalctl -u gpuserver -n 20 --no-pager; false; }")
        servers[0].until("gpuserver status", 20)
        expect(servers[0].ok("gpuserver gpus"), "simulated GPU")
    with check("the second server imports the pool's authority, and locks its GPUs, as a server with NVIDIA's driver does"):
        servers[1].write("/root/authority", servers[0].ok("gpuserver pool export"), "600")
        servers[1].ok("gpuserver pool import /root/authority && rm /root/authority")
        servers[1].ok("systemctl start gpuserver || { journalctl -u gpuserver -n 20 --no-pager; false; }")
        servers[1].until("gpuserver status", 20)
        expect(servers[1].ok("ls /run/lock/gpusession"), "GPU-")
        servers[1].ok("systemctl stop gpuserver")
    with check("a starting server takes over files that root changed while it was stopped"):
        servers[1].ok("gpuserver token create --name nobody && gpuserver clients revoke stolen && systemctl start gpuserver")
        servers[1].until("gpuserver clients | grep 'stolen.*revoked'", 20)
        assert servers[1].ok("stat -c %U /var/lib/gpuserver/*.json | sort -u") == "gpuserver"
        servers[1].ok("gpuserver clients forget stolen && systemctl stop gpuserver")
    with check("the signer alone has the authority, and refuses processes of the server's user beside the server"):
        assert servers[0].ok("stat -c '%U %a' /var/lib/gpuserver-ca/authority.key") == "gpuserver-ca 600"
        servers[0].fails("ls /var/lib/gpuserver/ca /var/lib/gpuserver/tokens.json")
        servers[0].fails(f"{AS_SERVER} cat /var/lib/gpuserver-ca/authority.key")
        expect(servers[0].run(f"{AS_SERVER} gpuserver pool export 2>&1").out, "not the main process of gpuserver.service")
        servers[0].ok("journalctl -u gpuserver-ca | grep 'signed for server gpu1'")
    with check("all that loads the driver has a user of its own, without network, who has no right of the server's"):
        servers[0].until("pgrep -f '[g]puserver-worker --monitor'", 20)
        for program, user in (("/usr/bin/gpuserver serve", "gpuserver"), ("libexec/gpusession/gpuserver-starter", "gpuserver-worker"),
                              ("gpuserver-worker --monitor", "gpuserver-worker")):
            assert set(servers[0].ok(USERS.format(program)).split()) == {user}, servers[0].ok("ps -ef")
        pid = servers[0].ok("systemctl show -P MainPID gpuserver").strip()
        monitor = servers[0].ok("pgrep -f '[g]puserver-worker --monitor'").strip()
        net = servers[0].ok(f"readlink /proc/{pid}/ns/net /proc/{monitor}/ns/net").split()
        assert net[0] != net[1], net
        expect(servers[0].ok("gpuserver status"), "one for its workers")
        for path in ("/var/lib/gpuserver", "/var/lib/gpuserver-ca/authority.key", f"/proc/{pid}/fd", f"/proc/{pid}/mem"):
            servers[0].fails(f"{AS_STARTER} sh -c 'ls {path}/ || cat {path}' 2>&1")
        servers[0].fails(f"{AS_STARTER} kill -0 {pid}")
        servers[0].fails(f"{AS_STARTER} gpuserver status")
        ask = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/gpuserver-worker/start.sock'); print(s.recv(4096))"
        expect(servers[0].run(f'{AS_SERVER} python3 -c "{ask}" 2>&1').out, "not the main process of gpuserver.service")
    with check("a server of before, whose authority is in its own folder, moves it to the signer when it starts"):
        before = servers[1].ok("sha256sum </var/lib/gpuserver-ca/authority.key")
        servers[1].ok(EARLIER)
        servers[1].ok("systemctl start gpuserver")
        servers[1].until("gpuserver status", 20)
        assert servers[1].ok("sha256sum </var/lib/gpuserver-ca/authority.key") == before
        expect(servers[1].ok("gpuserver token list"), "nobody")
        servers[1].fails("ls /var/lib/gpuserver/ca")
        servers[1].ok("systemctl stop gpuserver")
    with check("a value set while the server runs is stored in a file of its own"):
        expect(servers[0].ok("gpuserver config set warm_workers 3 && gpuserver config get warm_workers --origin"), "90-runtime.toml")
        servers[0].ok("gpuserver config unset warm_workers")
    with check("the client joins with a token from a credential when it starts"):
        token = servers[0].ok("gpuserver token create --name 'client*' 2>/dev/null")
        client.write("/etc/credstore/gpusession.token", token, "600")
        client.write("/etc/gpusession/conf.d/lease.toml", CLIENT)
        client.write("/etc/gpusession/servers.toml", '[[server]]\naddress = "gpu1"\n')
        client.ok("systemctl enable --now gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
    with check("alice runs vectorAdd by ssh, with nothing in her dotfiles"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("health finds no fault in alice's way to a GPU, and runs a CUDA program on one"):
        told = client.ok("ssh alice@client 'gpusession health --gpu --json || true'")
        rows = {row["id"]: row for row in json.loads(told)["checks"]}
        for name in ("library.first", "login.daemon", "network.control-port", "network.data-port", "network.accepted", "gpu.result"):
            if rows[name]["state"] != "ok":
                raise AssertionError(rows[name])
    with check("stats counts what alice used, for her and for an administrator; smi lists a program of hers, and not to bob"):
        client.until("su -l alice -c 'gpusession stats --json' | grep -Eq '\"by\":\"you\"[^}]*\"programs\":[1-9]'", 20)
        expect(servers[0].ok("gpuserver stats --users"), "alice")
        client.push([site.programs / "longRun"], "/usr/local/bin")
        client.start("program", "longRun 120", user="alice")
        client.until("su -l alice -c 'gpusession smi' | grep -q ' alice .*longRun'", 20)
        assert "longRun" not in client.ok("su -l bob -c 'gpusession smi'")
        expect(client.ok("gpusession smi"), "longRun")
        client.ok("systemctl stop program")
    with check("the server's workers give up rights that they do not need"):
        servers[0].until("gpuserver ps --json | grep -q '\"state\": *\"warm\"'", 20)
        rows = json.loads(servers[0].ok("gpuserver ps --json"))["workers"]
        levels = {row["isolation"] for row in rows if row["state"] in ("warm", "active")}
        if levels != {"full"}:
            raise AssertionError(levels)
        # Workers and the monitor have the user of the starter, a filter, and no capability.
        user = servers[0].ok("id -u gpuserver-worker").strip()
        for row in [*(row for row in rows if row["state"] in ("warm", "active")), {"pid": servers[0].ok("pgrep -f '[g]puserver-worker --monitor'").strip()}]:
            status = dict(line.split(":\t", 1) for line in servers[0].ok(f"cat /proc/{row['pid']}/status").splitlines() if ":\t" in line)
            assert status["Uid"].split()[0] == user and status["Seccomp"] == "2" and status["NoNewPrivs"] == "1", status
            assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0, status
    with check("a shell that alice started before the installation runs vectorAdd, too"):
        client.ok("touch /tmp/go")
        expect(client.until("grep -q status /run/older.out && cat /run/older.out", 20), "sums right")
    with check("after a reboot the machine has its GPUs again"):
        client.lab("reboot")
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
