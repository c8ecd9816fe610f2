"""Logins succeed, and in time, whatever the daemon does: absent, hung, deaf, garbled, dripping, late, too much; and if the module panics."""
from harness import TARGET, expect

ORDER = 70
# Stands in for the daemon on pam.sock: accepts, and answers in one of several wrong ways.
FAKE = r"""
import os, socket, sys, time
how, path = sys.argv[1], "/run/gpusession/pam.sock"
if os.path.exists(path): os.unlink(path)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(path); os.chmod(path, 0o600)
# Whose a socket is shows the uid that it has begun to listen with.
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
        # "hung": says nothing
    except OSError: pass
"""
HOW = {
    "refused": "has left a socket and does not listen",
    "closes": "accepts and closes",
    "hung": "accepts and says nothing",
    "backlog": "has a full backlog",
    "garbage": "answers garbage",
    "drip": "answers byte by byte",
    "toomuch": "answers far too much",
    "late": "answers when nobody waits any more",
    "stranger": "is another user's process with a good answer",
}
# These leave nothing to wait for; the one that drips hears of a login's end with its next byte.
AT_ONCE = {"refused": 0, "closes": 0, "garbage": 0, "drip": 100, "toomuch": 0, "stranger": 0}
# What the module may wait for the daemon (timeout_ms), and how much later it may go on: a stand-in in Python answers some of these, too.
DEADLINE, LATE = 500, 100
# The same for whole logins, which do more than that and never take as long twice. One that waited a second time would be later by DEADLINE.
LOGIN_LATE = 150
# A machine that does other things makes logins slower, never faster: of this many, most have to stay within their limit where only the
# module is measured, and one where the whole login is.
TRIES = 8
# But none of them takes so much longer than the deadline: less than a daemon that drips for six seconds, or answers each login in turn.
SLACK = 3000


def run(site, check):
    client = site.client
    client.write("/root/fake.py", FAKE)
    own = {}

    def login(note, *kinds, wait=DEADLINE, answers=False):
        """Logins wait for no more than the deadline, beside what they take without a daemon, and have the variables of one that answers."""
        for kind in kinds:
            limit = own[kind] + wait + (LATE if kind == "module" else LOGIN_LATE)
            took = client.logins(kind, TRIES) if kind == "module" else client.logins(kind, TRIES, limit)
            typical = sorted(took)[len(took) // 2] if kind == "module" else min(took)
            note(f"{kind} {typical:.0f} ms")
            assert typical <= limit, f"{kind}: {took} ms, more than {limit:.0f} ms"
            assert max(took) <= limit + SLACK, f"{kind}: {took} ms, where it takes {own[kind]:.0f} ms by itself"
        seen = client.ok("ssh alice@client 'echo in $(printenv GPUSESSION_ID || echo none) $(printenv NCCL_DEBUG || echo none)'").split()
        assert seen[0] == "in" and (seen[1] != "none" and seen[2] == "WARN" if answers else seen == ["in", "none", "none"]), seen

    client.ok("systemctl stop gpusession.service gpusession.socket")
    with check("a login with the daemon absent does not wait") as note:
        # Their own time: the slowest of some, since what they are compared with is the fastest.
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
