"""The control plane's figures, beside their goals: nothing here fails for being slow."""
ORDER = 80


def run(site, check):
    client = site.client
    with check("boot to GPUs allocated (goal: 1 s after the network is up)") as note:
        client.lab("reboot")
        client.until("gpusession status | grep -q 'is ready'", 20)
        up = "systemctl show -P ActiveEnterTimestampMonotonic network-online.target"
        granted = ("journalctl -b -t gpusessiond -o json --no-pager | python3 -c \"import json, sys; "
                   "print(next(int(l['__MONOTONIC_TIMESTAMP']) for l in map(json.loads, sys.stdin) if l.get('GPUSESSION_LEASE')))\"")
        start = "systemctl show -P ExecMainStartTimestampMonotonic gpusession"
        started, lease = int(client.ok(start)), int(client.ok(granted))
        network = int(client.ok(up) or 0)
        note(f"{(lease - max(started, network)) / 1000:.0f} ms after the network is up and the daemon started")
    with check("memory of the daemon at rest (goal: 15 MB)") as note:
        pid = client.ok("systemctl show -P MainPID gpusession")
        note(client.ok(f"awk '/^(RssAnon|VmRSS)/ {{ printf \"%s %.1f MB  \", $1, $2 / 1000 }}' /proc/{pid}/status"))
    with check("a program from start to end on a warm worker") as note:
        note(client.ok("su -l alice -c 'vectorAdd >/dev/null; time -p vectorAdd' 2>&1 | awk '/^real/ { print $2 \" s\" }'"))
