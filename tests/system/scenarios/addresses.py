"""A server behind a router that translates addresses, and the same server by IPv6 alone."""
import json
import subprocess
import time

from harness import HERE, Host, expect
from scenarios.outage import BACK

ORDER = 56
# The router passes both ports on as its own, so neither end sees the other's address.
ROUTER = """table ip translated {{
    chain before {{ type nat hook prerouting priority -100; tcp dport {{ 7601, 7602 }} dnat to {server}; }}
    chain after {{ type nat hook postrouting priority 100; ip daddr {server} masquerade; }}
}}
"""
# The router forgets its connections, as after a restart: those it finds are in another zone, and it
# lets no connection begin in the middle.
FORGETS = "table ip forgets { chain before { type filter hook prerouting priority -300; ct zone set 7; }; }"
STRICT = "echo 0 >/proc/sys/net/netfilter/nf_conntrack_tcp_loose"
# An address of the lab's network that no host has.
OTHER = "198.18.0.211"
# The client reaches no server by IPv4.
WITHOUT_IPV4 = "meta nfproto ipv4 tcp dport { 7601, 7602 } reject"


def run(site, check):
    client, router, server = Host("outside"), Host("router"), Host("inside")

    def address(host, family):
        shown = json.loads(host.ok(f"ip -j -{family} address show dev eth0 scope global"))
        return next(a["local"] for a in shown[0]["addr_info"] if "local" in a)

    def links(verb):
        subprocess.run([HERE / "lab", verb, client.name, server.name], check=True, capture_output=True)

    def peers():
        return {row["peer"] for row in json.loads(server.ok("gpuserver ps --json"))["workers"] if row["state"] == "active"}

    def works():
        expect(client.ok(f"ssh alice@{client.name} GPUSESSION_TRACE=why vectorAdd"), "sums right")
        client.start("program", "longRun 60", user="alice")
        server.until("gpuserver ps --json | grep -q '\"state\": *\"active\"'", 20)
        seen = peers()
        client.ok("systemctl stop program")
        return seen

    site.boot(client.name, router.name, server.name)
    links("block")
    router.network("nft", "-f", "-", stdin=ROUTER.format(server=address(server, 4)))
    router.network("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
    with check("a client joins a server behind a router through it, and writes the name that the server advertises"):
        site.install_server(server)
        server.write("/etc/gpusession/gpuserver.d/10-router.toml", f'advertise = "{router.name}"\n')
        server.ok("gpuserver pool init && systemctl start gpuserver")
        server.until("gpuserver status", 20)
        site.install_client(client)
        client.write("/etc/gpusession/conf.d/lease.toml", '[[lease]]\ngpus = 2\nmemory = "40%"\n')
        client.fails(f"ping -c 1 -W 1 {server.name}")
        client.ok(f"gpusession join {address(router, 4)} {server.ok('gpuserver token create 2>/dev/null')}")
        expect(client.ok("cat /etc/gpusession/servers.toml"), f'"{router.name}:7601"')
    with check("through the router the machine boots with its lease, and alice's programs run; the server sees the router") as note:
        client.ok("systemctl enable --now gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
        seen = works()
        assert all(address(router, 4) in peer for peer in seen), seen
        note(", ".join(seen))
    with check("a program continues when the router forgets its connections") as note:
        client.start("program", "longRun 8; echo status $?", user="alice")
        server.until("gpuserver ps --json | grep -q '\"state\": *\"active\"'", 20)
        before = peers()
        router.network("sh", "-c", STRICT)
        router.network("nft", "-f", "-", stdin=FORGETS)
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        router.network("nft", "delete table ip forgets")
        assert "steps right" in seen and "status 0" in seen, seen
        back = server.ok(f"journalctl -b -t gpuserver MESSAGE_ID={BACK} --no-pager -o cat")
        expect(back, "without a connection")
        note(f"{before}; {back.splitlines()[-1]}")
    with check("a program that computes, one that makes no call, and the machine's lease continue when the machine gets another address") as note:
        server.until("! gpuserver ps --json | grep -q '\"state\": *\"active\"'", 20, "the program before has ended")
        client.ok("rm -f /tmp/idle; mkfifo -m 666 /tmp/idle")
        client.start("input", "sleep 300 >/tmp/idle")
        client.start("idle", "python3 /usr/local/bin/idle_program.py 0.1 </tmp/idle", user="alice")
        client.until("grep ready /run/idle.out", 20)
        client.start("program", "longRun 12; echo status $?", user="alice")
        server.until("gpuserver ps --json | grep -c '\"state\": *\"active\"' | grep -qx 2", 20)
        begin, four = time.monotonic(), address(client, 4)
        client.ok(f"ip address del {four}/24 dev eth0; ip address add {OTHER}/24 dev eth0")
        for count in (1, 2):
            server.until(f"gpuserver ps --json | grep -c '\"interruptions\": *[1-9]' | grep -q '[{count}-9]'", 30)
            note(f"{count} back after {time.monotonic() - begin:.1f} s")
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        assert "steps right" in seen and "status 0" in seen, seen
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(client.ok(f"ssh alice@{client.name} vectorAdd"), "sums right")
        client.ok("echo check >/tmp/idle")
        client.until("grep intact /run/idle.out", 20)
        client.ok("systemctl stop idle input; rm /tmp/idle")
        client.ok(f"ip address del {OTHER}/24 dev eth0; ip address add {four}/24 dev eth0")
        client.until(f"ssh alice@{client.name} vectorAdd", 30)
    links("unblock")
    with check("by IPv6 alone, with the address in servers.toml, the machine has its lease again, and alice's programs run") as note:
        six = address(server, 6)
        client.ok("systemctl stop gpusession")
        server.ok("rm /etc/gpusession/gpuserver.d/10-router.toml && systemctl restart gpuserver")
        server.until("gpuserver status", 20)
        with client.filters(output=WITHOUT_IPV4):
            client.write("/etc/gpusession/servers.toml", f'[[server]]\naddress = "{six}"\n')
            client.ok("systemctl start gpusession")
            client.until("gpusession status | grep -q 'is ready'", 20)
            expect(client.ok("gpusession status"), f"[{six}]:7601")
            seen = works()
            assert all(address(client, 6) in peer for peer in seen), seen
            note(", ".join(seen))
    with check("a user joins by IPv6, and runs a program without the daemon"):
        client.ok("systemctl stop gpusession")
        token = server.ok("gpuserver token create 2>/dev/null")
        with client.filters(output=WITHOUT_IPV4):
            client.ok(f"su -l bob -c 'gpusession join {six} {token} --user --name bobs'")
            expect(client.ok(f"su -l bob -c 'gpusession run --server {six} -- vectorAdd'"), "sums right")
    for host in (client, router, server):
        host.lab("down")
