"""A stopped daemon: programs and the command line do not start it, a bus message does."""
from harness import expect

ORDER = 35
GROUP = "users"
CALL = "busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager ListLeases"
READY = "gpusession status | grep -q 'is ready'"


def run(site, check):
    client = site.client

    def stopped():
        assert client.run("systemctl is-active gpusession.service").out != "active", "the daemon runs again"

    with check("after a stop neither the command line nor a program starts the daemon"):
        client.ok("systemctl stop gpusession")
        client.until("! systemctl is-active gpusession.socket", 10)
        for command in ("status", "list", "env", "reload"):
            seen = client.run(f"gpusession {command}")
            assert seen.code == 69, str(seen)
            expect(seen.out, "the daemon is not running")
        client.fails("ssh alice@client vectorAdd")
        client.fails(CALL.replace("busctl", "busctl --auto-start=no"))
        stopped()
    with check("while the daemon is enabled, a message to its bus name starts it and opens the sockets"):
        client.ok(CALL)
        client.ok("systemctl is-active gpusession.service && systemctl is-active gpusession.socket")
        client.until(READY, 30)
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("the command line waits for a daemon that restarts after a crash, also after the fifth one"):
        for _ in range(5):
            client.ok("pid=$(systemctl show -P MainPID gpusession); kill -9 $pid; while kill -0 $pid 2>/dev/null; do sleep 0.01; done; gpusession status")
        client.until(READY, 30)
    with check("only root can start a disabled daemon"):
        client.ok("systemctl disable --now gpusession 2>&1")
        client.fails(CALL)
        stopped()
        client.ok("systemctl enable --now gpusession 2>&1")
        client.until(READY, 30)
