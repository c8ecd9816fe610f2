"""A CUDA program lives through restarts, crashes and upgrades of the daemon and of the server, on the same lease."""
import time

from harness import Failed, expect
from scenarios.policy import lease

ORDER = 40
# Processes of workers that serve programs.
SERVING = ("gpuserver ps --json | python3 -c \"import json, sys; "
           "print(*(w['pid'] for w in json.load(sys.stdin)['workers'] if w['state'] == 'active'))\"")
INSTALL = "DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/*.deb 2>&1"


def run(site, check):
    client = site.client

    def lives_through(what, name):
        with check(f"a running program and its lease live through {name}"):
            before = lease(client, "everyone")
            client.start("program", "longRun 8; echo status $?", user="alice")
            client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
            client.ok(what, timeout=120)
            client.until("gpusession status | grep -q 'is ready'", 20)
            expect(client.until("grep status /run/program.out && cat /run/program.out", 30), "steps right")
            assert lease(client, "everyone") == before, "another lease"
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")

    lives_through("systemctl restart gpusession", "systemctl restart gpusession")
    lives_through("systemctl kill -s KILL gpusession; sleep 2; systemctl is-active gpusession", "kill -9 of the daemon")
    lives_through("systemctl reload gpusession", "systemctl reload gpusession")
    lives_through(INSTALL, "the packages of the client installed over themselves")

    def serves():
        """The server that serves the program, and its worker's process."""
        for host in site.servers:
            pid = host.ok(SERVING)
            if pid:
                return host, pid
        raise Failed("no server serves a program")

    def lives_without_server(what, name):
        with check(f"a running program, its lease and its worker live through {name}") as note:
            before = lease(client, "everyone")
            client.start("program", "longRun 10; echo status $?", user="alice")
            client.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
            server, worker = serves()
            begin = time.monotonic()
            server.ok(what, timeout=120)
            expect(client.ok("ssh alice@client vectorAdd"), "sums right")
            note(f"a program that began then had its result {time.monotonic() - begin:.1f} s later")
            server.until("systemctl is-active gpuserver", 20)
            assert server.ok(SERVING).split() == [worker], f"another worker: {worker} before, {server.ok(SERVING)} now"
            expect(client.until("grep status /run/program.out && cat /run/program.out", 40), "steps right", "status 0")
            assert lease(client, "everyone") == before, "another lease"
            server.until(f"! kill -0 {worker}", 10, "the worker ends with its program")

    crash = "kill -9 $(systemctl show -P MainPID gpuserver)"
    lives_without_server("systemctl restart gpuserver", "systemctl restart gpuserver")
    lives_without_server(crash, "kill -9 of the server")
    lives_without_server(INSTALL, "the packages of the server installed over themselves")
    with check("systemctl stop gpuserver leaves nothing behind, nor does a stop right after kill -9"):
        workers = "pgrep -u gpuserver gpuserver-worke"
        server = next(host for host in site.servers if not host.run(workers).code)
        for first in ("true", crash):
            server.ok("systemctl start gpuserver")
            server.until(workers, 20, "workers for the lease that it had")
            # One that listens to nobody.
            server.start("stray", "echo $$$$ >/sys/fs/cgroup/system.slice/gpuserver.service/cgroup.procs; "
                                  "exec setpriv --reuid gpuserver --clear-groups sleep 1000")
            server.until("pgrep -u gpuserver -x sleep", 5)
            server.ok(f"{first}; systemctl stop gpuserver", timeout=120)
            server.until("! pgrep -u gpuserver", 5, "processes are left")
        server.ok("systemctl start gpuserver")
        client.until("gpusession status | grep -q 'is ready'", 60)
