"""A lease that nobody works on: whoever it concerns is warned, it is parked, and comes back without its program noticing."""
from harness import expect
from scenarios.policy import lease

ORDER = 46
IDLE = """
warn_after = "2s"
park_after = "6s"
"""
HOLDER = "python3 /usr/local/bin/idle_program.py 0.25 </tmp/holder"
# alice at a prompt, who presses Enter now and then.
PROMPT = """
set timeout 20
spawn ssh -tt alice@client
expect -re {\\$ $}
while 1 {
    send "\\r"
    expect {
        "GPU lease everyone: no GPU work" { break }
        -re {\\$ $} { after 100 }
        timeout { exit 1 }
        eof { exit 1 }
    }
}
expect -re {\\$ $} ; send "exit\\r"
expect eof
"""


def run(site, check):
    client, server = site.client, site.servers[0]
    name = lease(client, "everyone")
    client.start("signals", "stdbuf -oL busctl monitor org.gpusession1 --match \"type='signal',interface='org.gpusession1.Manager'\"")
    client.ok("rm -f /tmp/holder; mkfifo -m 666 /tmp/holder; systemd-run --quiet --unit=pipe sh -c 'exec sleep 1000 >/tmp/holder'")
    client.start("holder", HOLDER, user="alice")
    client.until("grep ready /run/holder.out", 20)
    client.write("/root/prompt.exp", PROMPT)
    client.start("prompt", "expect /root/prompt.exp; echo status $?")
    server.write("/etc/gpusession/gpuserver.d/idle.toml", IDLE)
    server.ok("systemctl reload gpuserver")
    with check("programs that listen on D-Bus are told of an idle lease, and the journal"):
        client.until("grep -A9 PrepareForLeaseLoss /run/signals.out", 20)
        expect(client.ok("cat /run/signals.out"), name)
        client.until("journalctl -b -t gpusessiond MESSAGE_ID=4ce9ee2052f4489a85b0b26cf698af47 -o cat --no-pager | grep .", 10)
    with check("a prompt says so"):
        expect(client.until("grep status /run/prompt.out && cat /run/prompt.out", 20), "status 0")
    with check("then it is parked: state, journal on both ends, memory of the card"):
        client.until("gpusession list --json | grep -q '\"state\": *\"parked\"'", 30)
        for host, who in ((client, "gpusessiond"), (server, "gpuserver")):
            host.until(f"journalctl -b -t {who} MESSAGE_ID=8e7515e298c743afb957f9de8ab9f3bf -o cat --no-pager | grep .", 10)
    with check("its program's next call has the memory back, with what was in it"):
        client.ok("echo check >/tmp/holder")
        client.until("grep intact /run/holder.out", 30)
        client.until("gpusession list --json | grep -q '\"state\": *\"active\"'", 20)
        assert lease(client, "everyone") == name
    server.ok("rm /etc/gpusession/gpuserver.d/idle.toml && systemctl reload gpuserver")
    with check("its owner's word makes it idle, and active again"):
        path = client.ok("busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager GetLease s " + name).split('"')[1]
        hint = f"busctl call org.gpusession1 {path} org.gpusession1.Lease SetIdleHint b"
        for word, state in (("true", "idle"), ("false", "active")):
            client.ok(f"{hint} {word}")
            client.until(f"gpusession list --json | grep -q '\"state\": *\"{state}\"'", 10)
    client.ok("systemctl stop pipe signals; true")
