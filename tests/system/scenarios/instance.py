"""A second server on a host, an instance of gpuserver@.service: its programs survive upgrades."""
import json

from harness import SIM, Failed, expect
from scenarios.packages import older

ORDER = 60
GROUP = "hosts"
UNIT = "gpuserver@blue"
CONFIG = f"""
name = "blue"
listen = "[::]:7611"
data_ports = "7612"
driver = "{SIM}"
drain_timeout = "2s"
[limits]
gpus = 4
"""
SERVER = "gpuserver --config /etc/gpusession/gpuserver-blue.toml"
RUN = "gpusession run --server gpu2:7611 -n 1 -m 30% --"
LOCAL = f"SIMGPU_DEVICES=2 gpusession local --driver {SIM} {{}}"
UPGRADE = "DEBIAN_FRONTEND=noninteractive dpkg -i /root/newer/*.deb 2>&1"


def run(site, check):
    client, host = site.client, site.servers[1]

    def serving():
        return [row["pid"] for row in json.loads(host.ok(f"{SERVER} ps --json"))["workers"] if row["program"] == "longRun"]

    with check("an instance starts while the unit without a name runs"):
        host.write("/etc/systemd/system/gpuserver@.service.d/simulated.conf", "[Service]\nEnvironment=SIMGPU_DEVICES=2 SIMGPU_ALL_USERS=1\n")
        host.write("/etc/gpusession/gpuserver-blue.toml", CONFIG)
        host.ok(f"systemctl daemon-reload && {SERVER} pool init --now && systemctl is-enabled {UNIT}")
        host.until(f"{SERVER} status", 20)
        expect(host.ok(f"{SERVER} gpus"), "simulated GPU")
        host.fails("systemctl is-active gpuserver")
    with check("alice joins it with her own identity, and runs a program on it"):
        token = host.ok(f"{SERVER} token create --name '*' 2>/dev/null")
        client.ok("su -l alice -c 'gpusession join gpu2:7611'", stdin=token)
        expect(client.ok(f"ssh alice@client {RUN} vectorAdd"), "sums right")

    def lives_through(what, name, seconds=6):
        with check(f"its program and worker survive {name}"):
            client.start("program", f"{RUN} longRun {seconds}; echo status $?", user="alice")
            host.until(f"{SERVER} ps | grep longRun", 20)
            before = serving()
            host.ok(what, timeout=120)
            host.until(f"systemctl is-active {UNIT} && {SERVER} status", 20)
            assert before and serving() == before, f"workers {before} before, {serving()} now"
            seen = client.until("grep status /run/program.out && cat /run/program.out", 60)
            expect(seen, "steps right")
            expect(seen, "status 0")

    with check("its descriptors are in systemd's store, and ps --all shows its workers with those of other servers"):
        client.start("program", f"{RUN} longRun 3", user="alice")
        host.until("gpuserver ps --all | grep '^blue .* longRun'", 20)
        stored = int(host.ok(f"systemctl show -P NFileDescriptorStore {UNIT}"))
        assert stored > 0, stored
        client.until("! systemctl is-active program", 20)
    lives_through(f"systemctl restart {UNIT}", "systemctl restart")
    host.push([site.deb(name) for name in ("gpuserver", "gpusession-libs")], "/root/newer")
    host.install([deb for deb in older(site) if deb.name.startswith(("gpuserver", "gpusession-libs"))])
    host.until(f"{SERVER} status", 20)
    lives_through(f"{UPGRADE}; test \"$(dpkg-query -W -f '${{Version}}' gpuserver)\" != 0.0.9-1", "an upgrade", 15)
    with check("a stop drains it, ends its program and leaves no process"):
        client.start("program", f"{RUN} longRun 60; echo status $?", user="alice")
        host.until(f"{SERVER} ps | grep longRun", 20)
        host.ok(f"systemctl stop {UNIT}", timeout=60)
        host.until("! pgrep -u gpuserver", 5, "processes are left")
        host.until("! pgrep -u gpuserver-worker -f 'gpuserver-worker$'", 5, "workers are left")
        expect(client.until("grep status /run/program.out && cat /run/program.out", 60), "cudaErrorDevicesUnavailable")
        assert host.ok(f"systemctl show -P NFileDescriptorStore {UNIT}") == "0"
    with check("gpusession local: alice runs a program on this host's card, with half of its memory, without root or a pool"):
        host.install([site.deb("gpusession")])
        host.push([site.programs / name for name in ("vectorAdd", "memFree")], "/usr/local/bin")
        expect(host.ok(LOCAL.format("-m 50% -- memFree"), timeout=120, user="alice"), "1024")
        expect(host.ok(LOCAL.format("-- vectorAdd"), timeout=120, user="alice"), "sums right")
        assert host.run(LOCAL.format("-n 3 -- vectorAdd"), timeout=120, user="alice").code == 125, "it has two cards"
        # The server stops with the last run.
        host.until("! pgrep -u alice gpuserver", 15, "alice's server is left")
        host.ok("dpkg -P gpusession 2>&1", timeout=60)
    with check("purging removes its folders"):
        host.ok(f"systemctl disable {UNIT}; dpkg -P gpuserver 2>&1", timeout=60)
        left = host.run("ls -d /var/lib/gpuserver* /run/gpuserver* /var/cache/gpuserver /usr/bin/gpuserver").out
        if [line for line in left.splitlines() if "cannot access" not in line]:
            raise Failed(left)
    client.ok("su -l alice -c 'rm -rf ~/.config/gpusession'")
    site.install_server(host)
