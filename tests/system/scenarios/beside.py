"""Debian's own NVIDIA packages beside ours: its nvidia-smi shows the lease; a libcuda.so.1 that comes later wins."""
import subprocess

from harness import HERE, Failed, expect

ORDER = 85
SOURCES = "deb {uri} {suite} contrib non-free\n"
APT = "export DEBIAN_FRONTEND=noninteractive; apt-get {} >/dev/null"
# A library that the loader knows, and whether it is ours.
LIBRARY = "ldconfig -p | grep libcuda.so.1"
OURS = "ldconfig -p | grep libcuda.so.1 | grep -q gpusession"
# Runs a command as if NVIDIA's kernel driver were loaded.
WITH_DRIVER = "unshare -m sh -ec 'mount -t tmpfs none /proc/driver; mkdir /proc/driver/nvidia; {}'"
SMI = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader"


def apt(host, verb):
    """apt-get with the network."""
    done = subprocess.run([HERE / "lab", "run", "--uplink", host.name, "sh", "-c", APT.format(verb)], capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stdout + done.stderr)


def with_driver(host, reinstall):
    """Our library stands back where the package finds a kernel driver, and is there again when it is looked for without one."""
    # It would look at once: the driver is there for the package's script only.
    host.ok("systemctl mask --runtime --now gpusession-loader.path")
    expect(host.ok(f"{WITH_DRIVER.format(reinstall)} 2>&1"), "this machine has a loaded NVIDIA kernel driver: its programs go on using that")
    host.fails(LIBRARY)
    host.ok("systemctl unmask --runtime gpusession-loader.path && systemctl start gpusession-loader.path")
    host.until(OURS, 5)


def install(host, suite, check):
    """Debian's nvidia-smi on a host that has a lease of 1 GiB of each GPU."""
    with check(f"{suite}: apt installs Debian's nvidia-smi without taking our libraries away"):
        uri = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True).stdout.split()
        uri = next(u for u in uri if u.rstrip("/").endswith("/debian"))
        host.write("/etc/apt/sources.list.d/non-free.list", SOURCES.format(uri=uri, suite=suite))
        apt(host, "update -qq")
        apt(host, "install -y -qq --no-install-recommends nvidia-smi")
        seen = host.ok("dpkg --get-selections gpusession-libs libnvidia-ml1 nvidia-smi")
        assert seen.count("install") == 3, seen
    with check(f"{suite}: it shows the machine's lease, since the loader finds our libnvidia-ml.so.1 first"):
        seen = host.ok(f"su -l alice -c '{SMI}'").splitlines()
        assert len(seen) == 2 and all(line.startswith("GPU-") and line.endswith("1024 MiB") for line in seen), seen
        expect(host.ok("su -l alice -c nvidia-smi"), "gpusession simulated GPU")
        expect(host.ok(f"ssh alice@{host.name} vectorAdd"), "sums right")
    with check(f"{suite}: Debian's libcuda1, which comes by way of an alternative, is not shadowed; without it ours is back"):
        apt(host, "install -y -qq --no-install-recommends libcuda1")
        host.until(f"! {OURS}", 5)
        expect(host.ok(LIBRARY), "libcuda.so.1")
        apt(host, "purge -y -qq libcuda1")
        host.until(OURS, 5)
        expect(host.ok(f"ssh alice@{host.name} vectorAdd"), "sums right")


def run(site, check):
    client = site.client
    install(client, "bookworm", check)
    with check("where NVIDIA's kernel driver is loaded, without a library so far, the loader does not get ours"):
        with_driver(client, "dpkg -i /root/debs/gpusession-libs_*.deb")
    with check("a libcuda.so.1 of another package that is installed after ours is not shadowed, and somebody says so"):
        client.push([site.sim_library()], "/root/theirs/usr/lib/x86_64-linux-gnu")
        client.write("/root/theirs/DEBIAN/control", "Package: libcuda1\nVersion: 1\nArchitecture: amd64\n"
                     "Maintainer: Somebody <somebody@example.org>\nDescription: libcuda.so.1 of somebody else\n")
        said = client.ok("dpkg-deb -b /root/theirs /root/theirs.deb && dpkg -i /root/theirs.deb 2>&1; "
                         "journalctl --sync; journalctl -b -u gpusession-loader -o cat")
        # Whoever of the two was first.
        expect(said, "libcuda.so.1: its programs go on using that")
        client.fails(OURS)
        # What the other library is: a simulated driver of this machine's own, without a lease.
        expect(client.ok("su -l alice -c 'SIMGPU_DEVICES=1 deviceQuery'"), "2048")
    with check("one that came while nobody looked is seen at the next start, and ours is back when it goes"):
        client.ok("dpkg -P libcuda1 2>&1")
        client.until(OURS, 5)
        client.ok("mkdir -p /opt/theirs && cp /root/theirs/usr/lib/x86_64-linux-gnu/libcuda.so.1 /opt/theirs")
        # It may be looking still, for the package that went.
        client.ok("systemctl stop gpusession-loader.path gpusession-loader-changed gpusession-loader && echo /opt/theirs >/etc/ld.so.conf.d/theirs.conf && ldconfig")
        client.ok(OURS)
        client.ok("systemctl start gpusession-loader.path")
        client.until(f"! {OURS}", 5)
        said = client.until("journalctl --sync; journalctl -b -u gpusession-loader -o cat | grep 'this machine has'", 5)
        expect(said, "/opt/theirs/libcuda.so.1: its programs go on using that")
        client.ok("rm /etc/ld.so.conf.d/theirs.conf && ldconfig")
        client.until(OURS, 5)
        expect(client.ok("systemctl list-dependencies --plain paths.target"), "gpusession-loader.path")
        client.ok("dpkg -i /root/theirs.deb 2>&1")
        client.fails(OURS)
    with check("setup-libs --force gives ours to the loader nevertheless, and says what it does"):
        expect(client.ok("gpusession setup-libs"), "/libcuda.so.1")
        expect(client.ok("gpusession setup-libs --force"), "programs use /usr/lib/x86_64-linux-gnu/gpusession/libcuda.so.1")
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        client.ok("gpusession setup-libs --remove && dpkg -P libcuda1 2>&1")
        client.fails(LIBRARY)
        expect(client.ok("gpusession setup-libs"), "programs use")
    with check("setup-libs --remove lasts: an upgrade does not give ours to the loader again"):
        client.ok("gpusession setup-libs --remove && dpkg -i /root/debs/gpusession-libs_*.deb 2>&1")
        client.fails(LIBRARY)
        expect(client.ok("gpusession setup-libs"), "programs use")
