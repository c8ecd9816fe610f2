"""Install, upgrade, remove, purge on Debian 12, 13 and Ubuntu; nothing is shadowed or left."""
import os
import urllib.request

from harness import CLIENT_PACKAGES, SIM, Host, expect, lab
from scenarios import beside
from scenarios.policy import lease

ORDER = 90
# Files that dpkg, systemd, podman and logins write. System users stay (see packaging/README.md), so
# the user database may differ.
NOT_OURS = r"^/(proc|sys|dev|run|tmp|root|home|var/log|var/cache|var/lib/(dpkg|systemd|pam|private|ucf|apt|containers)|etc/(passwd|group|shadow|gshadow|subuid|subgid)|etc/ld.so.cache|etc/\.pwd\.lock)"
# In shared folders, gpusession's files are recognized by their names. Home folders, systemd's
# records of units, and the pages that man has formatted do not count.
SHARED = "/dev/shm /run /tmp /var/cache /var/lib /var/tmp '(' -path /run/systemd -o -path /var/cache/man ')' -prune -o"
FILES = f"(find / -xdev | grep -Ev '{NOT_OURS}'; find {SHARED} -name '*gpus*' -print) 2>/dev/null | LC_ALL=C sort -u"
ALL = (*CLIENT_PACKAGES, "gpuserver")
SUITES = {"bookworm": "debian12", "trixie": "debian13", "noble": "ubuntu2404", "jammy": "ubuntu2204"}
# Ubuntu 22.04 is tested on request: LAB_SUITES=jammy.
WANTED = os.environ.get("LAB_SUITES", "bookworm,trixie,noble").split(",")


def older(site):
    """Returns packages of this tree with a lower version."""
    out = site.packages("deb", "older", "--version", "0.0.9")[0].parent
    return [site.deb(name, out) for name in ALL]


def unreachable(suite):
    """Returns why a suite's packages are not within reach; None if they are."""
    if suite in lab.UBUNTU_SUITES:
        try:
            urllib.request.urlopen(f"{lab.ubuntu()}/dists/{suite}/Release", timeout=10).close()
        except OSError as error:
            return f"{lab.ubuntu()} does not answer: {error}"
    return None


# A machine that is both client and server.
SIMULATED = "/etc/systemd/system/gpuserver.service.d/simulated.conf"
LEASE = '[[lease]]\nname = "everyone"\ngpus = 2\nmemory = "50%"\n'


def pool_of_one(site, host, driver=SIM):
    """Sets up a server with simulated GPUs and its only client on one host with all packages."""
    host.write(SIMULATED, "[Service]\nEnvironment=SIMGPU_DEVICES=2\n")
    host.write("/etc/gpusession/gpuserver.d/simulated.toml", f'driver = "{driver}"\n[limits]\ngpus = 2\n')
    host.write("/etc/gpusession/conf.d/lease.toml", LEASE)
    host.ok("systemctl daemon-reload && gpuserver pool init && systemctl enable --now gpuserver")
    host.until("gpuserver status", 20)
    host.ok(f"gpusession join {host.name}", stdin=host.ok("gpuserver token create --name '*' 2>/dev/null"))
    host.ok("systemctl enable --now gpusession")
    host.until("gpusession status | grep -q 'is ready'", 30)
    host.push([site.programs / p for p in ("vectorAdd", "longRun")], "/usr/local/bin")


def run(site, check):
    before_upgrade = older(site)
    newer = [site.deb(name) for name in ALL]
    for suite in WANTED:
        name = SUITES[suite]
        if reason := unreachable(suite):
            print(f"{name}: not tested: {reason}", flush=True)
            continue
        host = Host(name)
        site.boot(name, suite=suite)
        host.ok("mkdir -p /etc/ld.so.conf.d")
        host.ok(f"{FILES} >/root/before")
        with check(f"{name}: packages install, and start no service"):
            host.install(before_upgrade)
            host.ok("dpkg --audit && test -z \"$(dpkg --audit)\"")
            host.fails("systemctl is-active gpusession gpuserver")
            # Only the unit that notices other drivers runs.
            host.ok("systemctl is-active gpusession-loader.path")
        with check(f"{name}: the loader finds our libcuda.so.1, and login sessions use the PAM module"):
            expect(host.ok("ldconfig -p | grep libcuda.so.1"), "/gpusession/libcuda.so.1")
            expect(host.ok("ldconfig -p | grep libnccl-tuner.so"), "/gpusession/libnccl-tuner.so")
            host.ok("grep -q pam_gpusession /etc/pam.d/common-session")
        with check(f"{name}: units are well-formed, manual pages and completions are there"):
            # systemd before 254 ignores this key, and says so.
            host.ok("systemd-analyze verify gpusession.service gpuserver.service 2>&1 | grep -v -e '^$' -e \"'DelegateSubgroup' in section\" | { ! grep -i gpus; }")
            host.ok("cd /usr/share/man && ls man1/gpusession.1.gz man5/gpuserver.toml.5.gz man8/pam_gpusession.8.gz ../bash-completion/completions/gpusession")
        with check(f"{name}: a login and a program on a leased GPU"):
            pool_of_one(site, host)
            expect(host.ok(f"ssh alice@{name} vectorAdd"), "sums right")
            assert host.ok(f"ssh alice@{name} printenv GPUSESSION_ID")
            before = lease(host, "everyone")
            host.start("program", "longRun 12; echo status $?", user="alice")
            host.until("gpusession list --json | grep -q '\"processes\": *[1-9]'", 20)
        with check(f"{name}: an upgrade keeps configuration and replaces mapped libraries by rename"):
            host.ok("echo '# mine' >>/etc/gpusession/gpusession.toml")
            inode = host.ok("stat -c %i /usr/lib/x86_64-linux-gnu/gpusession/libcuda.so.1")
            host.install(newer)
            host.ok("grep -q mine /etc/gpusession/gpusession.toml")
            assert host.ok("stat -c %i /usr/lib/x86_64-linux-gnu/gpusession/libcuda.so.1") != inode
        with check(f"{name}: the program survives a simultaneous upgrade of both sides, on the same lease"):
            host.until("gpusession status | grep -q 'is ready'", 30)
            seen = host.until("grep status /run/program.out && cat /run/program.out", 40)
            expect(seen, "steps right")
            expect(seen, "status 0")
            assert lease(host, "everyone") == before
            expect(host.ok(f"ssh alice@{name} vectorAdd"), "sums right")
        with check(f"{name}: removing keeps configuration, and restores the loader and PAM"):
            host.ok("dpkg -r " + " ".join(ALL) + " 2>&1", timeout=120)
            host.fails("systemctl is-active gpusession.service gpusession.socket gpuserver.service")
            host.ok("test -e /etc/gpusession/gpusession.toml")
            host.fails("ldconfig -p | grep libcuda.so.1")
            host.fails("grep -r pam_gpusession /etc/pam.d")
            expect(host.ok("su -l alice -c 'echo in'"), "in")
        with check(f"{name}: purging leaves no file"):
            host.write("/etc/gpusession/gpuserver-b.toml", "# an instance's\n")
            host.ok("dpkg -P " + " ".join(ALL) + f" 2>&1; rm -r {SIMULATED} /usr/local/bin/vectorAdd /usr/local/bin/longRun")
            # systemd removes a unit's runtime folders some time after the unit has stopped.
            host.until(f"{FILES} | LC_ALL=C comm -13 /root/before - | {{ ! grep .; }}", 15, "files are left")
        with check(f"{name}: a libcuda.so.1 installed before is not shadowed"):
            host.push([site.sim_library()], "/root")
            host.ok("install -D -m 644 /root/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 && ldconfig")
            expect(host.install([site.deb("gpusession-libs")]), "libcuda.so.1")
            seen = host.ok("ldconfig -p | grep libcuda.so.1")
            assert "gpusession" not in seen, seen
            host.ok("dpkg -P gpusession-libs; rm /usr/lib/x86_64-linux-gnu/libcuda.so.1; ldconfig")
        if suite == "trixie":
            host.install(newer)
            pool_of_one(site, host)
            beside.install(host, suite, check)
        if suite == "noble":
            host.install(newer)
            pool_of_one(site, host)
            beside.ubuntu(host, check)
        host.lab("down")
