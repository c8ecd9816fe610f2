"""A CUDA program lives through restarts, a crash and an upgrade of the daemon, on the same lease."""
from harness import expect
from scenarios.policy import lease

ORDER = 40


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
    lives_through("DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/*.deb 2>&1", "the packages of the client installed over themselves")
