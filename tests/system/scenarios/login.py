"""Every way to start a program: each has the machine's GPUs, and nobody has typed anything."""
from harness import expect

ORDER = 20
PROGRAM = "/usr/local/bin/vectorAdd"
RIGHT = "sums right"

CONSOLE = r"""
set timeout 20
spawn login alice
expect "assword:" ; send "secret\r"
expect -re {\$ $} ; send "vectorAdd; exit\r"
expect { "sums right" { expect eof; exit 0 } timeout { exit 1 } eof { exit 1 } }
"""

UNIT = f"""[Service]
Type=oneshot
ExecStart={PROGRAM}
"""


def run(site, check):
    client = site.client
    runs = lambda how, **options: expect(client.ok(how, **options), RIGHT)  # noqa: E731

    with check("ssh with a command"):
        runs(f"ssh alice@client {PROGRAM}")
    with check("ssh with a terminal, in bash, csh and fish"):
        for shell in ("bash", "csh", "fish"):
            runs(f"ssh -tt alice@client {shell} -l -c {PROGRAM} </dev/null")
    with check("login on a console"):
        client.write("/root/console.exp", CONSOLE)
        runs("expect /root/console.exp")
    with check("su and su -l"):
        runs(f"su alice -c {PROGRAM}")
        runs(f"su -l alice -c {PROGRAM}")
    with check("sudo and sudo -i"):
        runs(f"sudo -u alice {PROGRAM}")
        runs(f"sudo -i -u alice {PROGRAM}")
        runs(f"echo secret | ssh alice@client sudo -S {PROGRAM}")
    with check("at"):
        client.ok(f"systemctl start atd; su -l alice -c 'echo \"{PROGRAM} >/tmp/at.out 2>&1\" | at now 2>&1'")
        client.until(f"grep '{RIGHT}' /tmp/at.out", 30)
    with check("a system unit, also one with User="):
        client.ok(f"systemd-run --quiet --wait --pipe {PROGRAM}")
        client.ok(f"systemd-run --quiet --wait --pipe -p User=alice {PROGRAM}")
    with check("systemd-run --user and a user unit"):
        client.write("/home/alice/.config/systemd/user/gpu.service", UNIT)
        client.ok("chown -R alice: /home/alice/.config")
        runs(f"ssh alice@client systemd-run --user --quiet --wait --pipe {PROGRAM}")
        client.ok("ssh alice@client 'systemctl --user daemon-reload; systemctl --user start gpu'")
    with check("cron"):
        client.write("/etc/cron.d/gpu", f"* * * * * alice {PROGRAM} >/tmp/cron.out 2>&1\n")
        client.ok("systemctl start cron")
        client.until(f"grep '{RIGHT}' /tmp/cron.out", 90)
        client.ok("rm /etc/cron.d/gpu")
    with check("a session has GPUSESSION_ID and nothing of ours in LD_*"):
        seen = client.ok("ssh alice@client env")
        expect(seen, "GPUSESSION_ID=")
        if "LD_" in seen:
            raise AssertionError(seen)
    with check("GPUSESSION_DISABLE=1 turns it off for a shell"):
        expect(client.fails(f"ssh alice@client 'export GPUSESSION_DISABLE=1; {PROGRAM}'"), "cudaErrorNoDevice")
    with check("nothing in alice's dotfiles is ours"):
        client.fails("grep -ril gpusession /home/alice --exclude-dir=.cache --exclude-dir=systemd")
