"""Logins succeed whatever the daemon does: absent, hung, deaf, garbled, dripping, or answering too much; and if the module panics."""
from harness import TARGET, expect

ORDER = 70
# Stands in for the daemon on pam.sock: accepts, and answers in one of several wrong ways.
FAKE = r"""
import os, socket, sys, time
how, path = sys.argv[1], "/run/gpusession/pam.sock"
if os.path.exists(path): os.unlink(path)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(path); os.chmod(path, 0o600)
s.listen(0 if how == "backlog" else 16)
open("/run/fake.ready", "w")
kept = []
while True:
    if how == "backlog":
        while True:
            c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); c.setblocking(False)
            try: c.connect(path); kept.append(c)
            except BlockingIOError: break
        time.sleep(1); continue
    c, _ = s.accept(); kept.append(c)
    try:
        if how == "garbage": c.send(os.urandom(300))
        elif how == "toomuch":
            for _ in range(64): c.send(b"GPUSESSION_ID=x\0" * 4000)
        elif how == "drip":
            for _ in range(60): c.send(b"G"); time.sleep(.1)
        # "hung": says nothing
    except OSError: pass
"""
HOW = {
    "hung": "accepts and says nothing",
    "backlog": "has a full backlog",
    "garbage": "answers garbage",
    "drip": "answers byte by byte",
    "toomuch": "answers far too much",
}
# From the start of a login to its first command, by su's PAM stack; best of three, so that a busy machine does not count.
TIMED = """python3 -c '
import subprocess, time
best = 99
for _ in range(3):
    begin = time.monotonic()
    subprocess.run(["su", "-l", "alice", "-c", "true"], check=True, stdin=subprocess.DEVNULL)
    best = min(best, time.monotonic() - begin)
print(int(best * 1000))'"""
# The module waits 500 ms at most; the rest is su, bash and a machine that does other things.
LIMIT_MS = 3000


def run(site, check):
    client = site.client
    client.write("/root/fake.py", FAKE)

    def login(note):
        milliseconds = int(client.ok(TIMED).splitlines()[-1])
        note(f"{milliseconds} ms")
        assert milliseconds < LIMIT_MS, f"{milliseconds} ms"
        seen = client.ok("ssh alice@client echo in")
        assert seen == "in", seen

    with check("a login while the daemon runs") as note:
        login(note)
    with check("a login with the daemon stopped by SIGSTOP") as note:
        client.ok("systemctl kill -s STOP gpusession")
        try:
            login(note)
        finally:
            client.ok("systemctl kill -s CONT gpusession")
    client.ok("systemctl stop gpusession.service gpusession.socket")
    with check("a login with the daemon absent") as note:
        login(note)
    for how, words in HOW.items():
        with check(f"a login where the daemon {words}") as note:
            client.ok("rm -f /run/fake.ready; mkdir -p /run/gpusession")
            client.start("fake", f"python3 /root/fake.py {how}")
            client.until("test -e /run/fake.ready", 10)
            login(note)
            client.ok("systemctl stop fake; rm -f /run/gpusession/pam.sock")
    with check("a login with a module that panics") as note:
        module = "/usr/lib/x86_64-linux-gnu/security/pam_gpusession.so"
        client.push([TARGET / "pam/examples/libpam_panicking.so"], "/root")
        client.ok(f"cp {module} /root/module.so && install -m 644 /root/libpam_panicking.so {module}")
        try:
            login(note)
        finally:
            client.ok(f"install -m 644 /root/module.so {module}")
    with check("with the daemon back, logins have GPUs"):
        client.ok("systemctl start gpusession.socket gpusession.service")
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
