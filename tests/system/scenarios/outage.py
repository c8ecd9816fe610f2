"""Boots while the servers are unreachable; when they are back, GPUs appear without intervention."""
import json
import time

from harness import expect
from scenarios.policy import lease

ORDER = 50
GROUP = "faults"
UNIT = """[Unit]
Requires=gpusession-ready.target
After=gpusession-ready.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/bin/vectorAdd
[Install]
WantedBy=multi-user.target
"""


# A network that is incomplete while a file exists, like one with an unplugged second cable.
SLOW = """[Unit]
Before=network-online.target
[Service]
Type=oneshot
ExecStart=sh -c 'while [ -e /root/slow ]; do sleep 0.1; done'
[Install]
WantedBy=network-online.target
"""
# Prints the number of processes that use the machine's lease.
IN_USE = "gpusession status --json | python3 -c \"import json, sys; print(json.load(sys.stdin)['leases'][0]['processes'])\""
# Message id: a program's connection is back.
BACK = "e393be9b6a434016ae3d34cc0851e035"
# Time, in milliseconds, that a login would wait for the daemon; su takes a tenth of it.
DEADLINE_MS = 500


def run(site, check):
    client, server = site.client, site.servers[0]
    with check("the client boots with its server cut off and a network that is never complete, and logins work at once") as note:
        client.write("/etc/systemd/system/needs-gpus.service", UNIT)
        client.write("/etc/systemd/system/slow-network.service", SLOW)
        client.ok("touch /root/slow; systemctl enable needs-gpus slow-network")
        server.lab("cut", "--silent")
        # The boot is complete only with the waiting unit, so `lab reboot`, which waits for that,
        # cannot be used.
        client.lab("stop")
        client.start_without_waiting()
        result = client.until("ssh alice@client true", 10)
        assert result == "", result
        client.fails("systemctl is-active network-online.target")
        # The fastest of several, since the booting machine is busy.
        took = client.logins("su", 8, DEADLINE_MS - 1)
        note(f"su {min(took):.0f} ms")
        assert min(took) < DEADLINE_MS, f"{took} ms: they wait for the daemon"
    with check("logins have a session id and the variables of [environment]"):
        expect(client.ok("ssh alice@client env"), "GPUSESSION_ID=")
        expect(client.ok("ssh alice@client env"), "NCCL_DEBUG=WARN")
    with check("meanwhile a program gets the error that the system is not ready, and the waiting unit waits"):
        expect(client.fails("ssh alice@client 'GPUSESSION_TRACE=why vectorAdd'", timeout=60), "cudaErrorSystemNotReady")
        client.fails("systemctl is-active needs-gpus gpusession-ready.target")
        expect(client.ok("systemctl show -P StatusText gpusession"), "0/2 GPUs leased; waiting: ")
    with check("the journal reports that the server does not answer, and why the lease waits"):
        lost = client.until("journalctl -b -x -t gpusessiond MESSAGE_ID=6ff34f01d228494abdf676921495ecad --no-pager | grep -A9 Subject", 30)
        expect(lost, "A GPU server does not answer")
    client.start("shell", "until [ -e /tmp/now ]; do sleep 0.1; done; vectorAdd; echo status $?", user="alice")
    with check("when the server is back, a shell started before has GPUs"):
        server.lab("heal")
        client.until("gpusession status | grep -q 'is ready'", 60)
        client.ok("touch /tmp/now")
        expect(client.until("grep status /run/shell.out && cat /run/shell.out", 20), "sums right")
    with check("the unit that waited for gpusession-ready.target has started"):
        client.until("systemctl is-active needs-gpus", 20)
        client.ok("rm /root/slow; systemctl disable --now needs-gpus slow-network; "
                  "rm /etc/systemd/system/needs-gpus.service /etc/systemd/system/slow-network.service; systemctl daemon-reload")
    with check("the journal reports that the server answers again"):
        client.until("journalctl -b -t gpusessiond MESSAGE_ID=e377d21fb9aa491e9c2ccdce898d5c6f --no-pager -o cat | grep 'answers again'", 20)
    with check("if only the data port is closed, status and the journal name what a program could not reach, to its user and root") as note:
        with server.refuses(7602):
            expect(client.fails("ssh alice@client vectorAdd", timeout=60), "cudaErrorSystemNotReady")
            line = client.ok("gpusession status | grep -o '! .*could not be served.*'")
            assert all(words in line for words in ("(vectorAdd) of alice", "server gpu1 at ", ":7602: Connection refused")), line
            note(line)
            expect(client.ok("ssh alice@client gpusession status"), "could not be served")
            assert "could not be served" not in client.ok("ssh bob@client gpusession status")
            told = client.ok("journalctl -b -x -t gpusessiond MESSAGE_ID=5d0f6a3b1c7e4b0c9a52e8f4d7316ab9 --no-pager")
            assert all(words in told for words in ("A program could not reach its GPUs", ":7602: Connection refused", "open data_ports of the server (7602)")), told
            assert told.count("could not be served") == 1, f"once for one program: {told}"
            client.until(f"test $({IN_USE}) = 0", 10, "its workers are returned")
    with check("the failure is listed until the port is open again"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        assert "could not be served" not in client.ok("gpusession status")
    with check("a program that loses its worker while it runs is listed, too"):
        client.start("victim", "echo fail | python3 /usr/local/bin/idle_program.py 0.1", user="alice")
        client.until("grep -q ready /run/victim.out", 20)
        workers = [w for w in json.loads(server.ok("gpuserver ps --json"))["workers"] if w["program"] == "python3"]
        server.ok(f"kill -9 {workers[0]['pid']}")
        client.until("grep 'failed 46' /run/victim.out", 20)
        line = client.until("gpusession status | grep -o '! .*lost its GPUs.*'", 5)
        assert "(python3) of alice" in line and "connection to gpu1 lost" in line, line
        note(line)
        client.ok("journalctl -b -t gpusessiond MESSAGE_ID=0e9b7c52f8d64a6fb3714c2d95ea08f3 --no-pager | grep 'has lost its GPUs'")
    with check("a program survives a cut of 52 s, which status shows meanwhile; both journals report its return") as note:
        client.start("program", "longRun 10; echo status $?", user="alice")
        server.until("gpuserver ps | grep longRun", 20)
        begin = time.monotonic()
        server.lab("cut", "--silent")
        line = client.until("gpusession status | grep -o '! .*has no connection to gpu1.*'", 30)
        note(line)
        time.sleep(begin + 52 - time.monotonic())
        server.lab("heal")
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        expect(seen, "steps right")
        expect(seen, "status 0")
        for host, name in ((client, "gpusessiond"), (server, "gpuserver")):
            host.until(f"journalctl -b -t {name} MESSAGE_ID={BACK} --no-pager -o cat | grep 'without a connection'", 10)
    with check("a program survives a suspend of its machine for half a minute"):
        client.start("program", "longRun 8; echo status $?", user="alice")
        server.until("gpuserver ps | grep longRun", 20)
        before = lease(client, "everyone")
        with client.suspended():
            time.sleep(30)
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        expect(seen, "steps right")
        expect(seen, "status 0")
        client.until("gpusession status | grep -q 'is ready'", 20)
        assert lease(client, "everyone") == before, "another lease"
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("a program computes right while 30 % of all packets are lost in each direction"):
        with server.loses(30):
            seen = client.ok("longRun 0.4; echo status $?", user="alice", timeout=180)
        expect(seen, "steps right")
        expect(seen, "status 0")
    with check("a program outlives restarts and a kill of its daemon and of its server's control process"):
        client.start("program", "longRun 12; echo status $?", user="alice")
        server.until("gpuserver ps | grep longRun", 20)
        for host, unit in ((client, "gpusession"), (server, "gpuserver")):
            host.ok(f"systemctl restart {unit}")
            host.ok(f"systemctl kill -s KILL --kill-whom=main {unit}")
            host.until(f"systemctl is-active {unit}", 20)
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        expect(seen, "steps right")
        expect(seen, "status 0")
