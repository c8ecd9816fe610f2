"""An idle lease: users are warned, then it is parked or released, or continues if it cannot be."""
import json

from harness import expect
from scenarios.policy import lease

ORDER = 46
GROUP = "restarts"
IDLE = """
warn_after = "2s"
park_after = "6s"
"""
RELEASED = """
warn_after = "1s"
release_after = "3s"
"""
CANNOT = """[Service]
Environment=SIMGPU_CHECKPOINT=0
"""
# Leased memory of each of the server's GPUs, in bytes.
LEASED = "gpuserver gpus --json | python3 -c \"import json, sys; print(*(g['leased_bytes'] for g in json.load(sys.stdin)['gpus']))\""
HOLDER = "python3 /usr/local/bin/idle_program.py 0.25 </tmp/holder"
# alice at a prompt, pressing Enter now and then. Her first prompt may show the warning already.
PROMPT = """
set timeout 20
spawn ssh -tt alice@client
while 1 {
    expect {
        "GPU lease everyone: no GPU work" { break }
        -re {\\$ $} { after 100 ; send "\\r" }
        timeout { exit 1 }
        eof { exit 1 }
    }
}
expect -re {\\$ $} ; send "exit\\r"
expect eof
"""


def end_holder(client):
    """Kills the program itself: it runs in a login session, not in the unit that started it."""
    client.ok("pkill -f '[i]dle_program.py'; systemctl stop holder; true")
    client.until("! pgrep -f '[i]dle_program.py'", 10)


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
    with check("an idle lease is announced on D-Bus and in the journal"):
        client.until("grep -A9 PrepareForLeaseLoss /run/signals.out", 20)
        expect(client.ok("cat /run/signals.out"), name)
        client.until("journalctl -b -t gpusessiond MESSAGE_ID=4ce9ee2052f4489a85b0b26cf698af47 -o cat --no-pager | grep .", 10)
    with check("the server's journal reports it too, with its owner and the next step"):
        idle = f"journalctl -b -t gpuserver MESSAGE_ID=4ce9ee2052f4489a85b0b26cf698af47 GPUSESSION_LEASE={name} --no-pager"
        entry = json.loads(server.until(f"{idle} -o json | grep .", 10).splitlines()[-1])
        assert entry["GPUSESSION_CLIENT"] == "client", entry
        expect(entry["GPUSESSION_REASON"], "no GPU work for")
        expect(entry["GPUSESSION_REASON"], "device memory will be moved to the server's")
        expect(server.ok(f"{idle} -x"), "Subject: A lease of GPUs is idle")
    with check("a prompt shows a warning"):
        expect(client.until("grep status /run/prompt.out && cat /run/prompt.out", 20), "status 0")
    with check("the lease is parked: shown by state, journals of both ends, memory of the card"):
        client.until("gpusession list --json | grep -q '\"state\": *\"parked\"'", 30)
        for host, who in ((client, "gpusessiond"), (server, "gpuserver")):
            host.until(f"journalctl -b -t {who} MESSAGE_ID=8e7515e298c743afb957f9de8ab9f3bf -o cat --no-pager | grep .", 10)
    with check("its program's next call brings the memory back, with its content"):
        client.ok("echo check >/tmp/holder")
        client.until("grep intact /run/holder.out", 30)
        client.until("gpusession list --json | grep -q '\"state\": *\"active\"'", 20)
        assert lease(client, "everyone") == name
    with check("a program that waits for a long kernel is not idle"):
        parked = client.ok("journalctl -b -t gpusessiond MESSAGE_ID=8e7515e298c743afb957f9de8ab9f3bf -o cat --no-pager | wc -l")
        client.ok("echo kernel 8 >/tmp/holder")
        seen = client.until("grep '^kernel' /run/holder.out", 30)
        assert float(seen.split()[-1]) >= 8, seen
        assert client.ok("journalctl -b -t gpusessiond MESSAGE_ID=8e7515e298c743afb957f9de8ab9f3bf -o cat --no-pager | wc -l") == parked
    server.ok("rm /etc/gpusession/gpuserver.d/idle.toml && systemctl reload gpuserver")
    with check("its owner's hint makes it idle, and active again"):
        path = client.ok("busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager GetLease s " + name).split('"')[1]
        hint = f"busctl call org.gpusession1 {path} org.gpusession1.Lease SetIdleHint b"
        for word, state in (("true", "idle"), ("false", "active")):
            client.ok(f"{hint} {word}")
            client.until(f"gpusession list --json | grep -q '\"state\": *\"{state}\"'", 10)
    state = "gpusession list --json | grep -q '\"state\": *\"{}\"'"
    with check("gpusession park moves a program's memory away and makes room on the server; alice may not do it"):
        result = client.run(f"su -l alice -c 'gpusession park {name}'")
        assert result.code == 77, result
        client.ok(state.format("active"))
        leased = server.ok(LEASED)
        assert client.ok(f"gpusession park {name}") == f"parked: {name}"
        client.until(state.format("parked"), 10)
        rows = [row["state"] for row in json.loads(server.ok("gpuserver ps --json"))["workers"] if row["lease"] == name and row.get("program")]
        assert rows == ["parked"], rows
        assert server.ok(LEASED) == "0 0" != leased, f"{leased} before, {server.ok(LEASED)} while it is parked"
        assert client.run(f"su -l alice -c 'gpusession unpark {name}'").code == 77
        expect(client.fails(f"gpusession park {name}"), "parked already")
    with check("gpusession unpark brings the memory back without a call of the program, with its content"):
        assert client.ok(f"gpusession unpark {name}") == f"asked to unpark: {name}"
        client.until(state.format("active"), 30)
        assert server.ok(LEASED) == leased, f"{leased} before, {server.ok(LEASED)} now"
        before = client.ok("grep -c intact /run/holder.out")
        client.ok("echo check >/tmp/holder")
        client.until(f"test $(grep -c intact /run/holder.out) -gt {before}", 30)
        assert lease(client, "everyone") == name
    with check("without a lease id both commands act on the leases that a program would get"):
        for verb, word in (("park", "parked"), ("unpark", "active")):
            seen = json.loads(client.ok(f"gpusession --json {verb}"))
            assert seen["leases"] == [name] and seen["parked"] == (verb == "park"), seen
            client.until(state.format(word), 30)
    with check("a program that waits for its GPU has a place in the queue, which its user sees, and continues when a GPU is free"):
        server.ok(f"gpuserver park {name}")
        client.ok("gpusession request -n 2 --memory 60% --ttl 1h -o /root/full.toml")
        client.start("other", "gpusession run --lease /root/full.toml -- longRun 60")
        server.until("gpuserver ps | grep longRun", 20)
        before = client.ok("grep -c intact /run/holder.out")
        client.ok("echo check >/tmp/holder")
        expect(client.until("su -l alice -c 'gpusession status' | grep position", 20), "parked, waits, position 1 of 1")
        path = client.ok("busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager GetLease s " + name).split('"')[1]
        assert client.ok(f"busctl get-property org.gpusession1 {path} org.gpusession1.Lease QueuePosition") == "(uu) 1 1"
        expect(server.ok(f"gpuserver leases | grep {name}"), "returning (place 1)")
        assert client.ok("grep -c intact /run/holder.out") == before
        client.ok("pkill longRun; gpusession release /root/full.toml")
        client.until(f"test $(grep -c intact /run/holder.out) -gt {before}", 30)
        client.until(state.format("active"), 10)
    with check("a lease that does not fit into parked_max is not parked, and the error states the room left"):
        server.write("/etc/gpusession/gpuserver.d/idle.toml", 'parked_max = "100MiB"\nreturn_limit = "2s"\n')
        server.ok("systemctl restart gpuserver")
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(server.fails(f"gpuserver park {name}"), "no room in host memory for 256 MiB: parked_max leaves 100 MiB")
        client.ok("echo spin 1 >/tmp/holder")
        client.until("grep spun /run/holder.out", 10)
    with check("a program that waits for its GPU beyond return_limit gets an error, and the GPU stays with its holder"):
        server.write("/etc/gpusession/gpuserver.d/idle.toml", 'return_limit = "2s"\n')
        end_holder(client)
        server.ok("systemctl restart gpuserver")
        client.until("gpusession status | grep -q 'is ready'", 20)
        client.start("holder", HOLDER, user="alice")
        client.until("grep ready /run/holder.out", 20)
        server.ok(f"gpuserver park {name}")
        # A lease without programs would lend its GPUs.
        client.ok("gpusession request -n 2 --memory 60% --ttl 1h -o /root/full.toml")
        client.start("other", "gpusession run --lease /root/full.toml -- longRun 30")
        server.until("gpuserver ps | grep longRun", 20)
        client.ok("echo check >/tmp/holder")
        expect(client.until("grep error /run/holder.out", 20), "error 46")
        expect(server.ok("journalctl --sync; journalctl -b -t gpuserver -o cat --no-pager"), "not free again within 2s (return_limit)")
        client.ok("pkill longRun; gpusession release /root/full.toml")
        client.until(f"gpusession list --json | grep -q {name}", 10)
    server.ok("rm /etc/gpusession/gpuserver.d/idle.toml && systemctl reload gpuserver")
    end_holder(client)
    with check("if the driver cannot park, idle programs are only warned, and a request to park states why it fails"):
        server.write("/etc/systemd/system/gpuserver.service.d/cannot.conf", CANNOT)
        server.write("/etc/gpusession/gpuserver.d/idle.toml", IDLE)
        server.ok("systemctl daemon-reload && systemctl restart gpuserver")
        client.start("holder", HOLDER, user="alice")
        client.until("grep ready /run/holder.out", 20)
        server.until("journalctl -b -t gpuserver -o cat --no-pager | grep 'its programs cannot be parked'", 20)
        expect(server.fails(f"gpuserver park {lease(client, 'everyone')}"), "cannot be parked")
        expect(client.ok("gpusession list --json"), '"active"')
        client.ok("echo check >/tmp/holder")
        client.until("grep intact /run/holder.out", 10)
    with check("if idle leases are released, a program gets an error, and the next program gets a new lease"):
        before = lease(client, "everyone")
        server.write("/etc/gpusession/gpuserver.d/idle.toml", RELEASED)
        server.ok("systemctl reload gpuserver")
        client.ok("echo fail >/tmp/holder")
        seen = client.until("test $(grep -c failed /run/holder.out) = 2 && cat /run/holder.out", 20)
        assert seen.count("failed 46") == 2, seen
        client.until("journalctl -b -t gpusessiond -o cat --no-pager | grep 'lost: no GPU work for'", 10)
        server.ok("rm /etc/gpusession/gpuserver.d/idle.toml && systemctl reload gpuserver")
        expect(client.until("ssh alice@client vectorAdd", 30), "sums right")
        assert lease(client, "everyone") != before
    server.ok("rm /etc/systemd/system/gpuserver.service.d/cannot.conf && systemctl daemon-reload && systemctl restart gpuserver")
    end_holder(client)
    client.ok("systemctl stop pipe signals; true")
