"""Boots while the servers are out of reach, and the other direction: they come back, GPUs appear by themselves."""
from harness import expect

ORDER = 50
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


def run(site, check):
    client, server = site.client, site.servers[0]
    with check("the client boots with its server cut off, and logins work at once"):
        client.write("/etc/systemd/system/needs-gpus.service", UNIT)
        client.ok("systemctl enable needs-gpus")
        server.lab("cut", "--silent")
        # The boot is complete only with the unit that waits: no `lab reboot`, which waits for that.
        client.lab("stop")
        client.start_without_waiting()
        result = client.until("ssh alice@client true", 10)
        assert result == "", result
    with check("meanwhile a program is told that the system is not ready, and the waiting unit waits"):
        expect(client.fails("ssh alice@client 'GPUSESSION_TRACE=why vectorAdd'", timeout=60), "cudaErrorSystemNotReady")
        client.fails("systemctl is-active needs-gpus gpusession-ready.target")
    client.start("shell", "until [ -e /tmp/now ]; do sleep 0.1; done; vectorAdd; echo status $?", user="alice")
    with check("when the server is back, a shell from before has GPUs"):
        server.lab("heal")
        client.until("gpusession status | grep -q 'is ready'", 60)
        client.ok("touch /tmp/now")
        expect(client.until("grep status /run/shell.out && cat /run/shell.out", 20), "sums right")
    with check("and the unit that waited for gpusession-ready.target has started"):
        client.until("systemctl is-active needs-gpus", 20)
        client.ok("systemctl disable --now needs-gpus; rm /etc/systemd/system/needs-gpus.service; systemctl daemon-reload")
