"""Logins succeed in time with an absent, hung, slow or broken daemon, and a module that panics."""
from harness import TARGET, expect

ORDER = 70
GROUP = "hosts"
# Replaces the daemon on pam.sock: accepts connections, and answers in one of several wrong ways.
FAKE = r"""
import os, socket, sys, time
how, path = sys.argv[1], "/run/gpusession/pam.sock"
if os.path.exists(path): os.unlink(path)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(path); os.chmod(path, 0o600)
# The peer sees the uid that called listen() as the socket's owner.
if how == "stranger": os.chmod(path, 0o666); os.seteuid(65534)
if how != "refused": s.listen(0 if how == "backlog" else 16)
os.seteuid(0)
open("/run/fake.ready", "w")
kept = []
while how == "refused": time.sleep(1)
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
        elif how == "closes": kept.pop().close()
        elif how == "stranger": c.recv(4096); c.send(b"gpsL\x01\0\x01\0\x0d\0\x0c\0GPUSESSION_IDaaaaaaaaaaaa")
        elif how == "late": time.sleep(2); c.send(b"GPUSESSION_ID=aaaaaaaaaaaa\0")
        # "hung": sends nothing
    except OSError: pass
"""
HOW = {
    "refused": "has left a socket and does not listen",
    "closes": "accepts and closes",
    "hung": "accepts and sends no answer",
    "backlog": "has a full backlog",
    "garbage": "answers garbage",
    "drip": "answers byte by byte",
    "toomuch": "answers far too much",
    "late": "answers after the module has given up",
    "stranger": "is another user's process with a good answer",
}
# With these, a login need not wait; the dripping daemon notices the end of a login at its next
# byte.
AT_ONCE = {"refused": 0, "closes": 0, "garbage": 0, "drip": 100, "toomuch": 0, "stranger": 0}
# Time that the module may wait for the daemon (timeout_ms), and the tolerance: the replacement in
# Python also answers some of these connections.
DEADLINE, LATE = 500, 100
# Tolerance of whole logins, whose duration varies. A login that waited a second time would be later
# by DEADLINE.
LOGIN_LATE = 150
# Load makes logins slower, never faster. Of this many, most have to stay within their limit if only
# the module is measured, and one of them if the whole login is.
TRIES = 8
# No login may exceed the deadline by this much, which is less than a daemon takes that drips for
# six seconds or answers one login after another.
SLACK = 3000


def run(site, check):
    client = site.client
    client.write("/root/fake.py", FAKE)
    own = {}

    def login(note, *kinds, wait=DEADLINE, answers=False):
        """Logins take at most the deadline longer than without a daemon; answers set variables."""
        for kind in kinds:
            limit = own[kind] + wait + (LATE if kind == "module" else LOGIN_LATE)
            took = client.logins(kind, TRIES) if kind == "module" else client.logins(kind, TRIES, limit)
            typical = sorted(took)[len(took) // 2] if kind == "module" else min(took)
            note(f"{kind} {typical:.0f} ms")
            assert typical <= limit, f"{kind}: {took} ms, more than {limit:.0f} ms"
            assert max(took) <= limit + SLACK, f"{kind}: {took} ms, but {own[kind]:.0f} ms without a daemon"
        seen = client.ok("ssh alice@client 'echo in $(printenv GPUSESSION_ID || echo none) $(printenv NCCL_DEBUG || echo none)'").split()
        assert seen[0] == "in" and (seen[1] != "none" and seen[2] == "WARN" if answers else seen == ["in", "none", "none"]), seen

    client.ok("systemctl stop gpusession.service gpusession.socket")
    with check("a login with the daemon absent does not wait") as note:
        # Duration without a daemon: the slowest of several, since the fastest is compared with it.
        for kind, count in (("module", 5), ("su", 5), ("ssh", 5), ("first", 3)):
            took = client.logins(kind, count)
            own[kind] = max(took)
            note(f"{kind} {min(took):.0f} ms")
            assert kind != "module" or min(took) < LATE, took
    client.ok("systemctl start gpusession.socket gpusession.service")
    client.until("gpusession status | grep -q 'is ready'", 20)
    with check("a login while the daemon runs") as note:
        login(note, "module", "su", "ssh", "first", answers=True)
    with check("a login with the daemon stopped by SIGSTOP") as note:
        client.ok("systemctl kill -s STOP gpusession")
        try:
            login(note, "module", "su", "ssh", "first")
        finally:
            client.ok("systemctl kill -s CONT gpusession")
    client.ok("systemctl stop gpusession.service gpusession.socket")
    for how, words in HOW.items():
        with check(f"a login where the daemon {words}") as note:
            client.ok("rm -f /run/fake.ready; mkdir -p /run/gpusession")
            client.start("fake", f"python3 /root/fake.py {how}")
            client.until("test -e /run/fake.ready", 10)
            login(note, "module", "su", "ssh", wait=AT_ONCE.get(how, DEADLINE))
            client.ok("systemctl stop fake; rm -f /run/gpusession/pam.sock")
    with check("a login with a module that panics") as note:
        module = "/usr/lib/x86_64-linux-gnu/security/pam_gpusession.so"
        client.push([TARGET / "pam/examples/libpam_panicking.so"], "/root")
        client.ok(f"cp {module} /root/module.so && install -m 644 /root/libpam_panicking.so {module}")
        try:
            login(note, "module", "su", "ssh")
        finally:
            client.ok(f"install -m 644 /root/module.so {module}")
    with check("with the daemon back, logins have GPUs"):
        client.ok("systemctl start gpusession.socket gpusession.service")
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
