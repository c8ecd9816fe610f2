"""More clients than GPUs: leases wait in FIFO order, users see their place, each gets its turn."""
from harness import Host, expect
from scenarios.policy import lease

ORDER = 44
GROUP = "restarts"
LEASES = """
[[lease]]
name = "first"
memory = "80%"

[[lease]]
name = "second"
memory = "80%"
"""
# alice at a prompt of a waiting machine.
PROMPT = """
set timeout 20
spawn ssh -tt alice@client2
while 1 {
    send "\r"
    expect {
        -re {GPU lease [a-z]+ waits, position 1 of 2} { break }
        -re {\\$ $} { after 100 }
        timeout { exit 1 }
        eof { exit 1 }
    }
}
expect -re {\\$ $} ; send "exit\\r"
expect eof
"""
# A machine's leases are requested at the same time, so that their order is open.
PLACES = ("gpusession list --json | python3 -c \"import json, sys; print(*sorted(f\\\"{l['position']}/{l['waiting']}\\\" "
          "for l in json.load(sys.stdin)['leases']))\"")
# Waiting clients, as the server reports them.
QUEUE = "gpuserver queue --json | python3 -c 'import json, sys; print(*(row[\"client\"] for row in json.load(sys.stdin)[\"queue\"]))'"


def run(site, check):
    client, other, third = site.client, Host("client2"), Host("client3")
    site.boot("client2", "client3")
    with check("a second machine, whose leases do not fit beside the first one's, waits in order"):
        site.install_client(other)
        token = site.servers[0].ok("gpuserver token create --name 'client*' 2>/dev/null")
        other.write("/etc/gpusession/conf.d/lease.toml", LEASES)
        other.ok(f"gpusession join gpu1 {token}")
        other.ok("systemctl enable --now gpusession")
        other.until(f"{PLACES} | grep -q '1/2 2/2'", 30)
        expect(other.ok("gpusession status"), "waiting, position 1 of 2")
    with check("D-Bus, the journal and systemctl status show it too"):
        seen = "".join(other.ok(f"busctl get-property org.gpusession1 /org/gpusession1/lease/{name} org.gpusession1.Lease QueuePosition WaitsFor")
                       for name in ("first", "second"))
        assert all(text in seen for text in ("(uu) 1 2", "(uu) 2 2", "GPU(s) are wanted")), seen
        expect(other.ok("journalctl --sync; journalctl -b -t gpusessiond MESSAGE_ID=3c5bcca2e10b4c509583dce6a9babeb1 -o cat --no-pager"), "lease first: waits: position")
        expect(other.ok("systemctl status gpusession --no-pager"), "waiting: position")
        expect(site.servers[0].ok("journalctl --sync; journalctl -b -t gpuserver MESSAGE_ID=1b2f23ff354d44fb8b9cec6cfd471c07 -o cat --no-pager"), "client2")
    with check("alice sees it at her prompt there, once"):
        other.write("/root/prompt.exp", PROMPT)
        seen = other.ok("expect /root/prompt.exp")
        assert seen.count("position 1 of 2") == 1, seen
    with check("her programs get an error that asks to try again"):
        expect(other.fails("ssh alice@client2 vectorAdd"), "cudaErrorSystemNotReady")
    with check("a third machine, whose request is later, waits behind them: three machines and two GPUs"):
        site.install_client(third)
        token = site.servers[0].ok("gpuserver token create --name 'client*' 2>/dev/null")
        third.write("/etc/gpusession/conf.d/lease.toml", '[[lease]]\nname = "third"\nmemory = "80%"\n')
        third.ok(f"gpusession join gpu1 {token}")
        third.ok("systemctl enable --now gpusession")
        third.until(f"{PLACES} | grep -q 3/3", 30)
    with check("GPUs that the first machine releases go to the requests that have waited longest"):
        before = lease(client, "everyone")
        client.ok("gpusession release " + before)
        other.until("gpusession status | grep -q 'is ready: 2 GPU'", 60)
        expect(other.ok("ssh alice@client2 vectorAdd"), "sums right")
        # The client learns of that at its next try, up to half a minute later.
        site.servers[0].until(f"test \"$({QUEUE})\" = client3", 10)
    third.ok("systemctl stop gpusession")
    third.lab("down")
    with check("the first machine, whose request is new, waits behind them"):
        client.ok("systemctl reload gpusession")
        client.until(f"{PLACES} | grep -q 1/1", 30)
    with check("a machine that boots while others hold all GPUs is up without GPUs, waits in the queue, and gets its turn"):
        client.lab("reboot")
        client.until(f"{PLACES} | grep -q 1/1", 30)
        expect(client.ok("systemctl is-active multi-user.target gpusession.service"), "active\nactive")
        expect(client.fails("ssh alice@client vectorAdd"), "cudaErrorSystemNotReady")
        other.ok("systemctl stop gpusession")
        client.until("gpusession status | grep -q 'is ready'", 60)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    other.lab("down")
