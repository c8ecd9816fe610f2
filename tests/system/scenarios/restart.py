"""A CUDA program and its lease survive restarts, crashes and upgrades of daemon and server."""
import json
import time

from harness import CLIENT_PACKAGES, Failed, expect
from scenarios.bus import MANAGER
from scenarios.packages import older
from scenarios.policy import lease

ORDER = 40
GROUP = "restarts"
# Pids of the workers that serve programs.
SERVING = ("gpuserver ps --json | python3 -c \"import json, sys; "
           "print(*(w['pid'] for w in json.load(sys.stdin)['workers'] if w['state'] == 'active'))\"")
# Program of workers, which have no arguments.
WORKER = "/usr/libexec/gpusession/gpuserver-worker"
# Upgrades the packages installed before, which have a lower version.
UPGRADE = "DEBIAN_FRONTEND=noninteractive dpkg -i /root/newer/*.deb 2>&1"
VERSIONS = "dpkg-query -W -f '${Version} ' "
# Number of clients that have joined, by the audit trail.
JOINS = "gpuserver audit --event join --json | grep -c '\"event\"'; true"
# A watchdog time shorter than the unit's minute.
WATCHDOG = "/run/systemd/system/gpusession.service.d/watchdog.conf"
# A delay before systemd restarts the daemon.
SLOW = "/run/systemd/system/gpusession.service.d/slow.conf"
# Crashes the daemon, returns while no daemon runs, and prints the number of descriptors in
# systemd's store.
DOWN = ("systemctl kill -s KILL gpusession; until seen=$(systemctl show -p SubState -p NFileDescriptorStore gpusession); "
        "echo \"$seen\" | grep -q SubState=auto-restart; do sleep 0.05; done; echo \"$seen\" | sed -n s/NFileDescriptorStore=//p")
STORED = "systemctl show -P NFileDescriptorStore gpusession"
# Number of programs that use leases.
RUNNING = ("gpusession list --json | python3 -c \"import json, sys; "
           "print(sum(l['processes'] for l in json.load(sys.stdin)['leases']))\"")
# A lease for each of alice's sessions: 409 MiB of a card's 2048 MiB; half of the card is
# everyone's.
SESSIONS = '[[lease]]\nname = "session"\nclass = "session"\nfor_user = "alice"\nmemory = "20%"\n'
# Crashes the daemon, and waits until systemd has restarted it.
KILL = ("n=$(systemctl show -P NRestarts gpusession); systemctl kill -s KILL gpusession; for i in $(seq 200); do sleep 0.1; "
        "test $(systemctl show -P NRestarts gpusession) -gt $n && systemctl is-active gpusession && exit; done; exit 1")
HANG = ("systemctl kill -s STOP gpusession; for i in $(seq 300); do sleep 0.1; "
        "test $(systemctl show -P NRestarts gpusession) -gt {} && exit; done; exit 1")
# A unit that needs GPUs from its start.
NEEDS = """[Unit]
Requires=gpusession-ready.target
After=gpusession-ready.target
[Service]
ExecStart=/bin/sleep infinity
ExecStop=/bin/sh -c '/usr/local/bin/vectorAdd >/run/needs.out 2>&1'
"""
# Replaces the daemon: stores as many descriptors as systemd accepts, and one more, of a process
# that exits with it.
FULL = "/run/systemd/system/gpusession.service.d/full.conf"
FILL = r"""
import array, os, signal, socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
address = os.environ["NOTIFY_SOCKET"]
s.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
for n in range(MOST + 1):
    fd = os.pidfd_open(os.getpid())
    name = f"process.abcdefghijkl.{n:032x}"
    s.sendmsg([f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
s.send(b"READY=1")
signal.pause()
"""


def typed(client, name, command):
    """Starts a command that reads the pipe `/run/NAME` until the unit `NAME-open` is stopped."""
    client.ok(f"systemctl stop {name}-open 2>/dev/null; rm -f /run/{name}; mkfifo -m 666 /run/{name}; "
              f"systemd-run --quiet --collect --unit={name}-open sh -c 'exec sleep 3000 >/run/{name}'")
    client.start(name, f"{command} </run/{name}")


def ready(client):
    client.until("gpusession status | grep -q 'is ready'", 20)


def without_daemon(client, command="true"):
    """Crashes the daemon, runs a command before its restart, counts the stored descriptors."""
    client.write(SLOW, "[Service]\nRestartSec=5\n")
    try:
        seen = client.ok(f"systemctl daemon-reload; {DOWN}; {command}")
    finally:
        client.ok(f"rm {SLOW}; systemctl daemon-reload")
    ready(client)
    # Crashes by the test do not count as failed starts.
    client.ok("systemctl reset-failed gpusession")
    return int(seen)


def known(client, check):
    """A restarted daemon knows its predecessor's grants, and notices when those programs exit."""
    def knows(count):
        client.until(f"test $({RUNNING}) = {count}", 20)

    with check("systemd stores a descriptor of a program that has GPUs"):
        knows(0)
        none = int(client.ok(STORED))
        typed(client, "holder", "exec su -l alice -c 'python3 /usr/local/bin/idle_program.py 0.05'")
        client.until("grep ready /run/holder.out", 20)
        knows(1)
        kept = int(client.ok(STORED))
        assert kept > none, f"{none} without a program, {kept} with one"
    with check("after systemctl restart the program is known, and its descriptor stays stored"):
        before = lease(client, "everyone")
        client.ok("systemctl restart gpusession")
        ready(client)
        knows(1)
        assert int(client.ok(STORED)) == kept and lease(client, "everyone") == before, f"{kept} descriptors and {before} before"
    with check("after kill -9 systemd stores the descriptor while no daemon runs, and the next daemon knows the program"):
        seen = without_daemon(client)
        assert seen == kept, f"{kept} before, {seen} meanwhile"
        knows(1)
        assert int(client.ok(STORED)) == kept and lease(client, "everyone") == before, f"{kept} descriptors and {before} before"
        client.ok("echo check >/run/holder")
        client.until("grep intact /run/holder.out", 20)
    with check("the daemon notices the exit of its predecessor's program, and removes the descriptor"):
        client.ok("systemctl stop holder-open")
        knows(0)
        client.until(f"test $({STORED}) = {none}", 10)


def full_store(client, check):
    """systemd can start a daemon with a full descriptor store, and the daemon can start with it."""
    with check("a daemon with a full descriptor store restarts, and drops unknown descriptors") as note:
        ready(client)
        before, none = lease(client, "everyone"), int(client.ok(STORED))
        most = int(client.ok("systemctl show -P FileDescriptorStoreMax gpusession"))
        client.write("/run/fill.py", FILL.replace("MOST", str(most)))
        client.write(FULL, "[Service]\nExecStart=\nExecStart=/usr/bin/python3 /run/fill.py\n")
        try:
            client.ok("systemctl daemon-reload && systemctl restart gpusession")
            client.until(f"test $({STORED}) = {most}", 20)
        finally:
            client.ok(f"rm {FULL}; systemctl daemon-reload")
        begin = time.monotonic()
        client.ok("systemctl restart gpusession")
        ready(client)
        note(f"{most} descriptors, {time.monotonic() - begin:.1f} s to the leases")
        client.until(f"test $({STORED}) = {none}", 20)
        assert lease(client, "everyone") == before, "another lease"


def session_lives(client, check):
    """A login session and its lease outlive the daemon, and end with the session's leader."""
    def bound():
        """Returns the lease's id, its login session, and the session's leader."""
        id = lease(client, "session")
        path = client.ok(f"busctl call {MANAGER} GetLease s {id}").split('"')[1]
        shown = client.ok(f"busctl get-property org.gpusession1 {path} org.gpusession1.Lease Session Leader").splitlines()
        return id, shown[0], int(shown[1].split()[1])

    def begin():
        typed(client, "login", "exec ssh alice@client sh")
        client.ok("echo 'memFree; echo had' >/run/login")
        client.until("grep had /run/login.out", 20)
        return bound()

    def gone():
        client.until("! gpusession list --json | grep -q '\"name\": *\"session\"'", 20)
        client.ok("systemctl stop login login-open; true")

    client.write("/etc/gpusession/conf.d/sessions.toml", SESSIONS)
    client.ok("systemctl reload gpusession")
    for what, name in (("systemctl restart gpusession", "systemctl restart"), (KILL, "kill -9")):
        with check(f"the lease of a login session survives {name} of the daemon, and the session's next program runs on it"):
            before = begin()
            client.ok(what)
            client.until(f"gpusession list --json | grep -q {before[0]}", 20)
            assert bound() == before, f"{before} before, {bound()} now"
            client.ok("echo 'memFree; echo has' >/run/login")
            seen = client.until("grep -q has /run/login.out && cat /run/login.out", 20).split()
            assert seen == ["409", "had", "409", "has"], seen
        with check(f"the lease ends with the session's leader, which a previous daemon registered ({name})"):
            client.ok(f"kill -9 {before[2]}")
            gone()
    with check("the lease also ends if the leader exits while no daemon runs"):
        before = begin()
        without_daemon(client, f"kill -9 {before[2]}")
        gone()
    client.ok("rm /etc/gpusession/conf.d/sessions.toml && systemctl reload gpusession")


def run(site, check):
    client = site.client
    client.write("/run/systemd/system/needs.service", NEEDS)
    client.ok("systemctl daemon-reload && systemctl start needs")
    needs = client.ok("systemctl show -P MainPID needs")
    known(client, check)
    full_store(client, check)
    session_lives(client, check)

    def lives_through(what, name, seconds=5):
        with check(f"a running program and its lease survive {name}"):
            before = lease(client, "everyone")
            client.start("program", f"longRun {seconds}; echo status $?", user="alice")
            client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
            client.ok(what, timeout=120)
            client.until("gpusession status | grep -q 'is ready'", 20)
            expect(client.until("grep status /run/program.out && cat /run/program.out", 30), "steps right")
            assert lease(client, "everyone") == before, "another lease"
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")

    lives_through("systemctl restart gpusession", "systemctl restart gpusession")
    lives_through(KILL, "kill -9 of the daemon")
    lives_through("systemctl reload gpusession", "systemctl reload gpusession")
    with check("the unit has a watchdog for a daemon that hangs"):
        assert client.ok("systemctl show -P WatchdogUSec gpusession") == "1min"
        client.write(WATCHDOG, "[Service]\nWatchdogSec=4\n")
        client.ok("systemctl daemon-reload && systemctl restart gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
    restarts = client.ok("systemctl show -P NRestarts gpusession")
    lives_through(HANG.format(restarts), "a daemon that hangs and is restarted by the watchdog", 9)
    with check("systemd names the watchdog as the cause"):
        expect(client.ok("journalctl -b -u gpusession -o cat --no-pager"), "Watchdog timeout")
        client.ok(f"rm {WATCHDOG} && systemctl daemon-reload && systemctl restart gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)

    def lower(host, packages):
        """Installs lower versions, and copies the new packages for the upgrade."""
        host.push([site.deb(name) for name in packages], "/root/newer")
        host.install([deb for deb in older(site) if deb.name.split("_")[0] in packages])
        seen = host.ok(VERSIONS + " ".join(packages)).split()
        assert all(version.startswith("0.0.9") for version in seen), seen

    with check("lower versions are installed on the client, and take over its lease"):
        before = lease(client, "everyone")
        lower(client, CLIENT_PACKAGES)
        client.until("gpusession status | grep -q 'is ready'", 20)
        assert lease(client, "everyone") == before
    lives_through(UPGRADE, "an upgrade of the client's packages", 9)
    with check("the client has the new versions"):
        assert "0.0.9" not in client.ok(VERSIONS + " ".join(CLIENT_PACKAGES))

    with check("a unit that needs gpusession-ready.target ran all the time; systemctl stop gpusession stops it while it has GPUs"):
        assert client.ok("systemctl show -P MainPID needs") == needs != "0"
        client.fails("test -e /run/needs.out")
        client.ok("systemctl stop gpusession")
        expect(client.ok("cat /run/needs.out"), "sums right")
        client.fails("systemctl is-active needs")
        client.ok("systemctl start gpusession; rm /run/systemd/system/needs.service; systemctl daemon-reload")
        client.until("gpusession status | grep -q 'is ready'", 20)

    def serves():
        """Returns the server that serves the program, and its worker's pid."""
        for host in site.servers:
            if not host.run("systemctl is-active gpuserver").code:
                # Repeated, since a program with a worker may not have connected to it yet.
                return host, host.until(f'p="$({SERVING})"; test -n "$p" && echo $p', 10)
        raise Failed("no server serves a program")

    def lives_without_server(what, name):
        with check(f"a running program, its lease and its worker survive {name}") as note:
            before = lease(client, "everyone")
            client.start("program", "longRun 20; echo status $?", user="alice")
            client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
            server, worker = serves()
            begin = time.monotonic()
            server.ok(what, timeout=120)
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")
            note(f"a program started meanwhile had its result {time.monotonic() - begin:.1f} s later")
            server.until("systemctl is-active gpuserver", 20)
            # The worker of that further program may still be exiting.
            server.until(f'test "$({SERVING})" = {worker}', 5, f"another worker than {worker}")
            seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
            expect(seen, "steps right")
            expect(seen, "status 0")
            assert lease(client, "everyone") == before, "another lease"
            server.until(f"! kill -0 {worker}", 10, "the worker ends with its program")

    crash = "kill -9 $(systemctl show -P MainPID gpuserver)"
    lives_without_server("systemctl restart gpuserver", "systemctl restart gpuserver")
    lives_without_server(crash, "kill -9 of the server")
    lives_without_server("systemctl restart gpuserver-worker", "systemctl restart gpuserver-worker")
    lives_without_server("kill -9 $(systemctl show -P MainPID gpuserver-worker)", "kill -9 of the starter")
    with check("lower versions are installed on the server"):
        serving = next(host for host in site.servers if lease(client, "everyone") in host.run("gpuserver leases").out)
        lower(serving, ("gpuserver", "gpusession-libs"))
    lives_without_server(UPGRADE, "an upgrade of the server's packages")
    with check("the server has the new versions"):
        assert "0.0.9" not in serving.ok(VERSIONS + "gpuserver gpusession-libs")
    with check("a running program comes back after both sides were upgraded while its connection was broken") as note:
        lower(serving, ("gpuserver", "gpusession-libs"))
        lower(client, CLIENT_PACKAGES)
        client.until("gpusession status | grep -q 'is ready'", 20)
        before, joined = lease(client, "everyone"), serving.ok(JOINS)
        client.start("program", "longRun 12; echo status $?", user="alice")
        server, worker = serves()
        begin = time.monotonic()
        serving.lab("cut", "--silent")
        try:
            serving.ok(UPGRADE, timeout=120)
            client.ok(UPGRADE, timeout=120)
        finally:
            serving.lab("heal")
        note(f"{time.monotonic() - begin:.1f} s without a connection")
        seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
        expect(seen, "steps right")
        expect(seen, "status 0")
        server.until(f"! kill -0 {worker}", 10, "the worker ends with its program")
        client.until("gpusession status | grep -q 'is ready'", 20)
        assert lease(client, "everyone") == before, "another lease"
        assert serving.ok(JOINS) == joined, "the client has joined again"
        for host, packages in ((serving, ("gpuserver", "gpusession-libs")), (client, CLIENT_PACKAGES)):
            assert "0.0.9" not in host.ok(VERSIONS + " ".join(packages))
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("systemctl stop gpuserver leaves no process, nor does a stop right after kill -9"):
        workers = f"pgrep -u gpuserver-worker -f '{WORKER}$'"
        server = next(host for host in site.servers if not host.run(workers).code)
        for first in ("true", crash):
            server.ok("systemctl start gpuserver")
            server.until(workers, 20, "workers for its previous lease")
            # A process that gets no message from the server.
            for unit, group in (("gpuserver", "server"), ("gpuserver-worker", "starter")):
                server.start(f"stray-{unit}", f"cd /sys/fs/cgroup/system.slice/{unit}.service; cd {group} 2>/dev/null; "
                                              f"echo $$$$ >cgroup.procs; exec setpriv --reuid {unit} --clear-groups sleep 1000")
                server.until(f"pgrep -u {unit} -x sleep", 5)
            server.ok(f"{first}; systemctl stop gpuserver", timeout=120)
            server.until("! pgrep -u gpuserver", 5, "processes are left")
            server.until("! pgrep -u gpuserver-worker | grep -vx $(systemctl show -P MainPID gpuserver-worker)", 5, "processes are left")
        server.ok("systemctl start gpuserver")
        client.until("gpusession status | grep -q 'is ready'", 60)
