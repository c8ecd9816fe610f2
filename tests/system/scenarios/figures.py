"""Figures of the control plane, with their goals; slow figures do not fail."""
import json
import statistics

ORDER = 80
GROUP = "hosts"

# Time from connecting to the daemon's socket until its answer has been read, from strace.
GRANT = r"""
import re, statistics, subprocess
took = []
for _ in range(11):
    trace = subprocess.run(["strace", "-f", "--seccomp-bpf", "-ttt", "-T", "-e", "trace=connect,read,recvfrom,close", "vectorAdd"], capture_output=True, text=True).stderr
    begin = fd = end = None
    for line in trace.splitlines():
        if not (when := re.match(r"(?:\[pid +\d+\] )?(\d+\.\d+) \w+\(", line)):
            continue
        when = float(when.group(1))
        if "connect(" in line and "grant.sock" in line:
            begin, fd = when, re.search(r"connect\((\d+)", line).group(1)
        elif begin and end is None and re.search(rf"(read|recvfrom)\({fd},.*= [1-9]", line):
            last = when + float(re.search(r"<([\d.]+)>$", line).group(1))
        elif begin and end is None and "connect(" in line:
            end = last
    took.append(end - begin)
print(f"{statistics.median(took) * 1000:.1f} ms, at most {max(took) * 1000:.1f} ms, with strace on these calls")
"""
# Number of the daemon's voluntary context switches: each ends with a wake-up.
SLEEPS = "awk '/^voluntary_ctxt/ { n += $2 } END { print n }' /proc/$(systemctl show -P MainPID gpusession)/task/*/status"


def run(site, check):
    client = site.client
    with check("boot to GPUs allocated (goal: 1 s after the network is up)") as note:
        client.lab("reboot")
        client.until("gpusession status | grep -q 'is ready'", 20)
        up = "systemctl show -P ActiveEnterTimestampMonotonic network-online.target"
        granted = ("journalctl --sync; journalctl -b -t gpusessiond -o json --no-pager | python3 -c \"import json, sys; "
                   "print(next(int(l['__MONOTONIC_TIMESTAMP']) for l in map(json.loads, sys.stdin) if l.get('GPUSESSION_LEASE')))\"")
        start = "systemctl show -P ExecMainStartTimestampMonotonic gpusession"
        started, lease = int(client.ok(start)), int(client.ok(granted))
        network = int(client.ok(up) or 0)
        note(f"{(lease - max(started, network)) / 1000:.0f} ms after the network is up and the daemon started")

    def in_pam(count):
        took = client.logins("module", count)
        return f"{statistics.median(took):.1f} ms, at most {max(took):.1f} ms"

    with check("a login's time in PAM, daemon up (goal: 20 ms)") as note:
        note(in_pam(51))
    with check("a login's time in PAM, daemon hung (goal: 550 ms)") as note:
        client.ok("systemctl kill -s STOP gpusession")
        try:
            note(in_pam(5))
        finally:
            client.ok("systemctl kill -s CONT gpusession")
    with check("a login's time in PAM, daemon absent (goal: 10 ms)") as note:
        client.ok("systemctl stop gpusession.service gpusession.socket")
        try:
            note(in_pam(51))
        finally:
            client.ok("systemctl start gpusession.socket gpusession.service")
    client.until("gpusession status | grep -q 'is ready'", 20)
    with check("a grant, from the socket to the ticket (goal: 2 ms at the daemon)") as note:
        client.write("/root/grant.py", GRANT)
        note(client.ok("su -l alice -c 'vectorAdd && python3 -' </root/grant.py").splitlines()[-1])
    with check("a program from start to end on a warm worker") as note:
        note(client.ok("su -l alice -c 'vectorAdd >/dev/null; time -p vectorAdd' 2>&1 | awk '/^real/ { print $2 \" s\" }'"))
    with check("device memory free again after kill -9 (goal: 2 s)") as note:
        before = client.ok("su -l alice -c memFree")
        client.start("holder", "python3 /usr/local/bin/idle_program.py 0.5 < <(sleep 1000)", user="alice")
        client.until(f"test $(su -l alice -c memFree) -lt {before}", 20)
        free = ("import os, subprocess, time; pid = int(subprocess.check_output(['pgrep', '-f', '^python3 .*idle_program'])); begin = time.monotonic(); "
                f"os.kill(pid, 9)\nwhile subprocess.check_output(['su', '-l', 'alice', '-c', 'memFree']).strip() != b'{before}': pass\n"
                "print(f'{(time.monotonic() - begin) * 1000:.0f} ms, including the time of the query')")
        client.write("/root/free.py", free)
        note(client.ok("python3 /root/free.py"))
    with check("memory of the daemon at rest (goal: 15 MB)") as note:
        pid = client.ok("systemctl show -P MainPID gpusession")
        note(client.ok(f"awk '/^(RssAnon|VmRSS)/ {{ printf \"%s %.1f MB  \", $1, $2 / 1000 }}' /proc/{pid}/status"))
    with check("wake-ups of the daemon at rest (goal: none besides the heartbeat of 2 s)") as note:
        leases = json.loads(client.ok("gpusession status --json"))["leases"]
        servers = len({lease["server"] for lease in leases} - {""})
        first = int(client.ok(SLEEPS))
        client.ok("sleep 20")
        woken = (int(client.ok(SLEEPS)) - first) / 20
        # One wake-up sends to all servers, one receives each answer; besides these, connections
        # check whether they are alive.
        note(f"{woken:.1f} a second, of which heartbeats to {servers} server(s) explain {(1 + servers) / 2:.1f}")
