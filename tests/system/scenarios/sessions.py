"""Leases of a user and of a login session: they begin with the first use, and end at logout."""
import json

from harness import Failed, expect
from scenarios.bus import MANAGER, escaped
from scenarios.policy import lease
from scenarios.restart import typed

ORDER = 35
GROUP = "users"
# The machine keeps its lease; leases of alice's sessions take precedence over it.
LEASES = """
[[lease]]
name = "session"
class = "session"
for_user = "alice"
memory = "20%"

[[lease]]
name = "bobs"
for_user = "bob"
memory = "20%"
"""
# A person at the console, who only waits at the prompt: the lease is requested all the same.
CONSOLE = r"""
set timeout 20
spawn login alice
expect "assword:" ; send "secret\r"
expect -re {\$ $} ; send "until test \$(session-leases) = 1; do :; done; echo lea''sed; exit\r"
expect {
    "leased" { expect eof; exit 0 }
    timeout { exit 1 }
    eof { exit 1 }
}
"""
# Number of leases of login sessions.
COUNT = "/usr/local/bin/session-leases"
COUNT_TEXT = """#!/bin/sh
gpusession list --mine --json | grep -o '"name": *"session"' | wc -l
"""
# Names of all leases; the second command succeeds if the named lease has its GPUs.
NAMES = "/usr/local/bin/lease-names"
NAMES_TEXT = """#!/bin/sh
gpusession list --mine --json | grep -o '"name": *"[a-z]*"' | cut -d'"' -f4
"""
READY = "gpusession status | grep 'ready .*on gpu1' | grep"
GRANTS = "journalctl --sync; journalctl -b -t gpusessiond MESSAGE_ID=a644770082934e8291254c1e8b4db1d8 -o cat --no-pager | wc -l"


# The free memory, in MiB, of a program's GPU identifies its lease: everyone's has 50 % of 2048 MiB,
# a session's or bob's 20 %.
EVERYONES, OWN = "1024", "409"
# A lease whose user appears later, for example from a network's database after boot.
LATE = '[[lease]]\nname = "late"\nfor_user = "carol"\nmemory = "20%"\n'
# A lease for each of bob's sessions. Two of his logins come from one session of alice's, as in two
# panes of a terminal multiplexer; the first one ends before the second.
TWICE = '[[lease]]\nname = "twice"\nclass = "session"\nfor_user = "bob"\nmemory = "20%"\n'
PANES = """#!/bin/sh
rm -f /tmp/pane-*
echo secret | su -l bob -c 'echo $GPUSESSION_ID; memFree; touch /tmp/pane-one; until test -e /tmp/pane-two; do sleep 0.1; done' &
until test -e /tmp/pane-one; do sleep 0.1; done
echo secret | su -l bob -c 'echo $GPUSESSION_ID; memFree; touch /tmp/pane-two; until test -e /tmp/pane-over; do sleep 0.1; done; memFree' &
wait %1
touch /tmp/pane-over
wait
"""
# One lease of alice while she is logged in, and one of the machine that yields to others.
CLASSES = """
[[lease]]
name = "hers"
class = "user"
for_user = "alice"
memory = "20%"

[[lease]]
name = "spare"
class = "background"
memory = "40%"
"""
# With everyone's half, alice's lease and the yielding lease on different GPUs, both GPUs together
# lack room for this one.
MORE = """
[[lease]]
name = "more"
gpus = 2
memory = "30%"
"""


def run(site, check):
    client, server = site.client, site.servers[0]
    client.write(COUNT, COUNT_TEXT, "755")
    client.write(NAMES, NAMES_TEXT, "755")
    client.write("/etc/gpusession/conf.d/sessions.toml", LEASES)
    client.ok("systemctl reload gpusession")
    client.until("gpusession status | grep -q 'bobs .*\\bready'", 20)
    with check("scp and sftp of a user with session leases lease no GPU"):
        before = client.ok(GRANTS)
        client.ok("echo x >/tmp/file && scp -q /tmp/file alice@client:/tmp/copy && scp -q alice@client:/tmp/copy /tmp/back")
        client.ok("echo 'get /tmp/copy /tmp/got' | sftp -q -b - alice@client && cmp /tmp/file /tmp/got")
        assert client.ok(GRANTS) == before, "a lease was granted"
    with check("a login by ssh leases once, at its first CUDA call, and releases at logout"):
        seen = client.ok(f"ssh alice@client '{COUNT}; vectorAdd; vectorAdd; {COUNT}; gpusession list'")
        lines = seen.splitlines()
        expect(seen, "sums right")
        assert lines[0] == "0" and lines[3] == "1", seen
        client.until(f"test $({COUNT}) = 0", 20, "the lease ends with the session")
    with check("a login on a console leases at once"):
        client.write("/root/console.exp", CONSOLE)
        client.ok("expect /root/console.exp")
        client.until(f"test $({COUNT}) = 0", 20)
    with check("two sessions have two leases, and a killed session releases its lease"):
        for unit in ("one", "two"):
            client.start(unit, "ssh -tt alice@client 'vectorAdd; exec sleep 1000' </dev/zero")
        client.until(f"test $({COUNT}) = 2 && test $(pgrep -cxu alice sleep) = 2", 20)
        # The units may already have ended with their sessions.
        client.ok("pkill -KILL -u alice sleep && { systemctl kill -s KILL one two || true; }")
        client.until(f"test $({COUNT}) = 0", 20)
    with check("at: a job has the lease of the submitting session while that is open, and the machine's afterwards"):
        client.ok("rm -f /tmp/at-*; systemctl start atd")
        typed(client, "login", "exec ssh alice@client sh")
        for name in ("open", "over"):
            job = f"until [ -e /tmp/at-{name}-go ]; do sleep 0.1; done; memFree >/tmp/at-{name}.new; mv /tmp/at-{name}.new /tmp/at-{name}"
            client.ok("cat >/run/login", stdin=f"echo '{job}' | at now 2>/dev/null\n")
        client.ok("echo 'memFree; echo had' >/run/login")
        expect(client.until("grep -q had /run/login.out && cat /run/login.out", 20), f"{OWN}\nhad")
        client.ok("touch /tmp/at-open-go")
        assert client.until("cat /tmp/at-open", 30) == OWN
        client.ok("systemctl stop login-open")
        client.until(f"! systemctl is-active login && test $({COUNT}) = 0", 20)
        client.ok("touch /tmp/at-over-go")
        assert client.until("cat /tmp/at-over", 30) == EVERYONES
    with check("a shell older than the daemon's start has the machine's lease and no session, and [environment] by gpusession env"):
        client.ok("systemctl stop gpusession")
        typed(client, "older", "exec ssh alice@client sh")
        client.ok("echo 'echo here' >/run/older")
        client.until("grep here /run/older.out", 20)
        client.ok("systemctl start gpusession")
        client.until("gpusession status | grep -q 'is ready'", 30)
        client.ok("cat >/run/older", stdin='echo set=${NCCL_DEBUG-none}; memFree; eval "$(gpusession env)"\n'
                  'echo set=${NCCL_DEBUG-none}; echo session=${GPUSESSION_ID-none}\n')
        seen = client.until("grep -q session= /run/older.out && cat /run/older.out", 20).split()
        assert seen == ["here", "set=none", EVERYONES, "set=WARN", "session=none"], seen
        assert client.ok(COUNT) == "0"
        client.ok("systemctl stop older-open older; true")
    with check("bob has his own lease, and alice can neither use nor release it"):
        bobs = lease(client, "bobs")
        expect(client.ok("ssh bob@client 'gpusession run -- printenv GPUSESSION_ID; gpusession env; vectorAdd'"), "sums right")
        seen = client.fails(f"ssh alice@client 'GPUSESSION_LEASE={bobs} GPUSESSION_TRACE=why vectorAdd'")
        expect(seen, "cudaErrorNoDevice")
        result = client.run(f"su -l alice -c 'gpusession release {bobs}'")
        assert result.code == 77, result
        assert lease(client, "bobs") == bobs
    with check("a user unit with GPUSESSION_ID gets the session's lease, else the machine's"):
        unit = "systemd-run --user --quiet --wait --pipe memFree"
        seen = client.ok(f"ssh alice@client 'memFree; {unit}; systemctl --user import-environment GPUSESSION_ID; {unit}; "
                         f"systemctl --user unset-environment GPUSESSION_ID; {unit}'")
        assert seen.split() == [OWN, EVERYONES, OWN, EVERYONES], seen
    with check("bob releases his own lease"):
        client.ok(f"su -l bob -c 'gpusession release {bobs}'")
        if bobs in client.ok("gpusession list"):
            raise Failed("still there")
    client.write("/etc/gpusession/conf.d/sessions.toml", TWICE)
    client.write("/usr/local/bin/panes", PANES, "755")
    client.ok("systemctl reload gpusession")
    with check("logins of one user inside one session share its lease until the last of them ends, even across a restart of the daemon"):
        seen = client.ok("ssh alice@client panes 2>/dev/null").split()
        assert len(seen) == 5 and seen == [seen[0], OWN, seen[0], OWN, OWN], seen
        client.until(f"test $({NAMES} | grep -c twice) = 0", 20)
        restarting = PANES.replace("wait %1\n", "wait %1; until test -e /tmp/pane-restarted; do sleep 0.1; done\n")
        client.write("/usr/local/bin/panes", restarting, "755")
        client.start("panes", "ssh alice@client panes")
        client.until("test -e /tmp/pane-two", 20)
        client.ok("systemctl restart gpusession && touch /tmp/pane-restarted")
        seen = client.until("! systemctl is-active panes >/dev/null && cat /run/panes.out", 30)
        assert [word for word in seen.split() if word == OWN] == [OWN] * 3, seen
    client.write("/etc/gpusession/conf.d/sessions.toml", LATE)
    client.ok("systemctl reload gpusession")
    with check("a lease for an unknown user has no owner, and becomes the user's without a reload once the user exists"):
        client.until(f"{READY} late", 20)
        late = lease(client, "late")
        path = f"/org/gpusession1/lease/{escaped(late)}"
        uid = f"busctl get-property org.gpusession1 {path} org.gpusession1.Lease UID"
        assert client.ok(uid) == "u 4294967294"
        client.ok("useradd -m carol")
        client.until(f'test "$({uid})" = "u $(id -u carol)"', 60)
        client.ok(f"su -l carol -c 'gpusession release {late}'")
        client.ok("userdel -rf carol 2>/dev/null; ! id carol")
    with check("on the machine's lease a user's limit counts that user's programs: one too many gets an error that names the limit, others run") as note:
        server.ok("gpuserver config set limits.user.alice.workers 1")
        client.start("hers", "longRun 60", user="alice")
        server.until("gpuserver ps --json | grep -q longRun", 20)
        seen = client.fails("ssh alice@client GPUSESSION_TRACE=why vectorAdd 2>&1")
        expect(seen, "cudaErrorDevicesUnavailable")
        expect(seen, "limit workers = 1 of user alice")
        note(seen.splitlines()[0])
        expect(client.ok("gpusession status"), "limit workers = 1 of user alice")
        expect(client.ok("ssh bob@client vectorAdd"), "sums right")
        # Her program that has just exited does not count.
        client.ok("systemctl stop hers")
        expect(client.ok("ssh alice@client 'vectorAdd && vectorAdd'"), "sums right")
        server.ok("gpuserver config unset limits.user.alice.workers")
        accounts = json.loads(server.ok("gpuserver accounting --user alice --kind process --json"))["records"]
        assert {r["user"] for r in accounts} == {"alice"} and accounts[-1]["executable"] == "/usr/local/bin/vectorAdd", accounts[-1]
    client.write("/etc/gpusession/conf.d/sessions.toml", CLASSES)
    client.ok("gpusession reload")
    with check("a lease of class user begins with the first CUDA call, and all sessions of the user share it"):
        client.until("gpusession status | grep -q 'is ready'", 20)
        assert "hers" not in client.ok(NAMES)
        seen = client.ok(f"ssh alice@client 'memFree; {NAMES}'")
        assert seen.splitlines()[0] == OWN, seen
        hers = lease(client, "hers")
        expect(client.ok("su -l alice -c memFree"), OWN)
        expect(client.ok("systemd-run --quiet --wait --pipe -p User=alice memFree"), OWN)
        assert client.ok(NAMES).split().count("hers") == 1 and lease(client, "hers") == hers
        expect(client.ok("ssh bob@client memFree"), EVERYONES)
    with check("a lease of class background stays while there is room, and yields to a waiting lease"):
        client.until(f"{NAMES} | grep spare", 20)
        spare = client.ok(f"busctl call {MANAGER} GetLease s {lease(client, 'spare')}").split('"')[1]
        assert client.ok(f"busctl get-property org.gpusession1 {spare} org.gpusession1.Lease Class") == 's "background"'
        server.write("/etc/gpusession/gpuserver.d/zz-more.toml", "[limits]\ngpus = 8\nmax_persistent = 4\n")
        server.ok("systemctl reload gpuserver")
        client.write("/etc/gpusession/conf.d/more.toml", MORE)
        client.ok("systemctl reload gpusession")
        client.until(f"{READY} more", 40)
        client.fails(f"{READY} spare")
        client.ok("rm /etc/gpusession/conf.d/more.toml && systemctl reload gpusession")
        client.until(f"{READY} spare", 60)
        server.ok("rm /etc/gpusession/gpuserver.d/zz-more.toml && systemctl reload gpuserver")
    client.ok("rm /etc/gpusession/conf.d/sessions.toml && systemctl reload gpusession")
