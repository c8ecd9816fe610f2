"""rpm installs, upgrades and erases the rpm packages, and their scriptlets work."""
import subprocess

from harness import HERE, Failed, Host, expect
from scenarios.beside import LIBRARY, OURS, with_driver
from scenarios.packages import pool_of_one
from scenarios.policy import lease

ORDER = 95
SIM = "/usr/lib64/gpusession/sim/libcuda.so.1"


def program(host, seconds):
    host.start("program", f"longRun {seconds}; echo status $?", user="alice")
    host.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)


def run(site, check):
    host = Host("rpm")
    site.boot("rpm")
    with check("rpm can be installed"):
        done = subprocess.run([HERE / "lab", "run", "--uplink", "rpm", "sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends rpm"],
                              capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stdout + done.stderr)
    # The host has no userland of an rpm distribution: dependencies cannot be resolved, all else
    # works as on one.
    rpm = "rpm --nodeps --ignoresize"
    older, newer = site.packages("rpm", "rpms-older", "--version", "0.0.9"), site.packages("rpm", "rpms")
    host.push(newer, "/root/newer")
    with check("with another libcuda.so.1, installed before or after ours, or NVIDIA's kernel driver, the loader does not get our library"):
        libs = "/root/newer/gpusession-libs-*.rpm"
        host.push([site.sim_library()], "/opt/theirs")
        host.ok("echo /opt/theirs >/etc/ld.so.conf.d/theirs.conf && ldconfig")
        expect(host.ok(f"{rpm} -i {libs} 2>&1"), "this machine has /opt/theirs/libcuda.so.1: its programs keep using it")
        host.fails(OURS)
        host.ok("rm /etc/ld.so.conf.d/theirs.conf && ldconfig")
        host.until(OURS, 5)
        host.ok("echo /opt/theirs >/etc/ld.so.conf.d/theirs.conf && ldconfig")
        host.until(f"! {OURS}", 5)
        host.ok(f"{rpm} -U --replacepkgs {libs}")
        host.fails(OURS)
        host.ok("rm /etc/ld.so.conf.d/theirs.conf && ldconfig")
        host.until(OURS, 5)
        with_driver(host, f"{rpm} -U --replacepkgs {libs}")
        host.ok("rpm -e gpusession-libs")
    with check("the packages install: users are created, the loader finds the library, no service is started"):
        host.push(older, "/root/older")
        host.ok(f"{rpm} -i /root/older/*.rpm 2>&1")
        host.ok("test -e /etc/profile.d/gpusession.csh && test ! -e /etc/csh/login.d/gpusession.csh")
        host.ok("id gpusession && id gpuserver")
        host.ok(f"gpusession setup-libs --remove && {rpm} -U --replacepkgs --oldpackage /root/older/gpusession-libs-*.rpm 2>&1")
        host.fails(LIBRARY)
        host.ok("gpusession setup-libs")
        expect(host.ok(LIBRARY), "/usr/lib64/gpusession/libcuda.so.1")
        host.fails("systemctl is-active gpusession gpuserver")
    with check("a program runs on a leased GPU"):
        pool_of_one(site, host, SIM)
        expect(host.ok("su -l alice -c vectorAdd"), "sums right")
        program(host, 12)
        held = lease(host, "everyone")
    with check("an upgrade restarts a running service, and keeps configuration"):
        host.ok("echo '# mine' >>/etc/gpusession/gpusession.toml")
        before = host.ok("systemctl show -P MainPID gpusession")
        host.ok(f"{rpm} -U /root/newer/*.rpm 2>&1")
        after = host.ok("systemctl show -P MainPID gpusession")
        assert after not in (before, "0"), f"main process {before} before, {after} after"
        host.ok("grep -q mine /etc/gpusession/gpusession.toml")
        host.ok("rpm -V --nodeps gpusession-libs libpam-gpusession gpuserver")
    with check("its program and its lease survive the upgrade"):
        host.until("gpusession status | grep -q 'is ready'", 30)
        expect(host.until("grep status /run/program.out && cat /run/program.out", 40), "steps right")
        assert lease(host, "everyone") == held
    with check("erasing prints how many programs lose their GPUs, and those programs fail"):
        host.ok("sed -i '1i drain_timeout = \"2s\"' /etc/gpusession/gpuserver.d/simulated.toml && systemctl reload gpuserver")
        program(host, 90)
        seen = host.ok("rpm -e --nodeps gpuserver 2>&1", timeout=120)
        expect(seen, "gpuserver: 1 running program(s) of clients lose their GPUs")
        expect(host.until("grep status /run/program.out && cat /run/program.out", 30), "cudaErrorDevicesUnavailable")
        host.fails("pgrep -u gpuserver,gpuserver-worker")
        host.ok(f"{rpm} -i /root/newer/gpuserver*.rpm 2>&1 && systemctl start gpuserver")
        host.until("vectorAdd", 60, user="alice")
        program(host, 90)
        expect(host.ok("rpm -e --nodeps gpusession 2>&1", timeout=120), "gpusession: 1 running program(s) lose their GPUs")
        expect(host.until("grep status /run/program.out && cat /run/program.out", 30), "cudaErrorDevicesUnavailable")
        host.ok(f"{rpm} -i /root/newer/gpusession-[0-9]*.rpm 2>&1 && systemctl start gpusession")
    with check("erasing stops the service and takes the library from the loader"):
        host.ok(f"{rpm} -e gpusession gpusession-libs libpam-gpusession gpuserver 2>&1".replace(" --ignoresize", ""))
        host.fails("systemctl is-active gpusession gpuserver")
        host.fails(LIBRARY)
        # Folders may stay, since cargo-generate-rpm packs only files.
        seen = host.ok("find / -xdev \\( -path /var/log -o -path /root -o -path /proc -o -path /var/lib/rpm \\) -prune "
                       "-o -name '*gpus*' ! -type d -print")
        assert seen == "/etc/gpusession/gpusession.toml.rpmsave", seen
    host.lab("down")
