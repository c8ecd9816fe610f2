"""Debian's NVIDIA packages: nvidia-smi shows the lease; a libcuda.so.1 installed later wins."""
import subprocess

from harness import HERE, Failed, expect

ORDER = 85
GROUP = "hosts"
SOURCES = "deb {uri} {suite} contrib non-free\n"
APT = "export DEBIAN_FRONTEND=noninteractive; apt-get {}"
# Shows the libcuda.so.1 in the loader's cache; the second command succeeds if it is gpusession's.
LIBRARY = "ldconfig -p | grep libcuda.so.1"
OURS = "ldconfig -p | grep libcuda.so.1 | grep -q gpusession"
# Runs a command as if NVIDIA's kernel driver were loaded.
WITH_DRIVER = "unshare -m sh -ec 'mount -t tmpfs none /proc/driver; mkdir /proc/driver/nvidia; {}'"
SMI = "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader"


def apt(host, verb):
    """Runs apt-get with access to the network, and returns its output."""
    done = subprocess.run([HERE / "lab", "run", "--uplink", host.name, "sh", "-c", APT.format(verb)], capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stdout + done.stderr)
    return done.stdout + done.stderr


def with_driver(host, reinstall):
    """The loader gets our library only while no NVIDIA kernel driver is loaded."""
    # The path unit would react at once: only the package's script sees the driver.
    host.ok("systemctl mask --runtime --now gpusession-loader.path")
    expect(host.ok(f"{WITH_DRIVER.format(reinstall)} 2>&1"), "this machine has a loaded NVIDIA kernel driver: its programs keep using it")
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
    with check(f"{suite}: nvidia-smi shows the machine's lease, since the loader finds our libnvidia-ml.so.1 first"):
        seen = host.ok(f"su -l alice -c '{SMI}'").splitlines()
        assert len(seen) == 2 and all(line.startswith("GPU-") and line.endswith("1024 MiB") for line in seen), seen
        expect(host.ok("su -l alice -c nvidia-smi"), "gpusession simulated GPU")
        expect(host.ok(f"ssh alice@{host.name} vectorAdd"), "sums right")
    with check(f"{suite}: Debian's libcuda1, installed by an alternative, is not shadowed; without it the loader gets ours again"):
        apt(host, "install -y -qq --no-install-recommends libcuda1")
        host.until(f"! {OURS}", 5)
        expect(host.ok(LIBRARY), "libcuda.so.1")
        apt(host, "purge -y -qq libcuda1")
        host.until(OURS, 5)
        expect(host.ok(f"ssh alice@{host.name} vectorAdd"), "sums right")


def ubuntu(host, check):
    """NVIDIA's packages of Ubuntu, which bring a libcuda.so.1, on a host with such a lease."""
    with check("noble: apt installs NVIDIA's nvidia-smi with a libcuda.so.1, which is not shadowed, and a message says so") as note:
        apt(host, "update -qq")
        said = apt(host, "install -y -qq --no-install-recommends nvidia-utils-580-server")
        expect(said, "libcuda.so.1: its programs keep using it")
        host.fails(OURS)
        expect(host.fails("su -l alice -c nvidia-smi"), "couldn't communicate with the NVIDIA driver")
    with check("noble: after `gpusession setup-libs --force`, as the message says, nvidia-smi and programs use the lease") as note:
        host.ok("gpusession setup-libs --force")
        seen = host.ok(f"su -l alice -c '{SMI}'").splitlines()
        assert len(seen) == 2 and all(line.startswith("GPU-") and line.endswith("1024 MiB") for line in seen), seen
        note(host.ok("su -l alice -c 'nvidia-smi --version' | head -n 1").strip())
        expect(host.ok(f"ssh alice@{host.name} vectorAdd"), "sums right")


def run(site, check):
    client = site.client
    install(client, "bookworm", check)
    with check("where NVIDIA's kernel driver is loaded, without a library so far, the loader does not get ours"):
        with_driver(client, "dpkg -i /root/debs/gpusession-libs_*.deb")
    with check("a libcuda.so.1 of another package, installed after ours, is not shadowed, and a message says so"):
        client.push([site.sim_library()], "/root/theirs/usr/lib/x86_64-linux-gnu")
        client.write("/root/theirs/DEBIAN/control", "Package: libcuda1\nVersion: 1\nArchitecture: amd64\n"
                     "Maintainer: Somebody <somebody@example.org>\nDescription: libcuda.so.1 of somebody else\n")
        said = client.ok("dpkg-deb -b /root/theirs /root/theirs.deb && dpkg -i /root/theirs.deb 2>&1; "
                         "journalctl --sync; journalctl -b -u gpusession-loader -o cat")
        # The message comes from the package's script or from the path unit, depending on which ran
        # first.
        expect(said, "libcuda.so.1: its programs keep using it")
        client.fails(OURS)
        # The other library is a simulated driver with a GPU of this machine, without a lease.
        expect(client.ok("su -l alice -c 'SIMGPU_DEVICES=1 deviceQuery'"), "2048")
    with check("a library installed while the path unit is stopped is seen at its start; without that library the loader gets ours again"):
        client.ok("dpkg -P libcuda1 2>&1")
        client.until(OURS, 5)
        client.ok("mkdir -p /opt/theirs && cp /root/theirs/usr/lib/x86_64-linux-gnu/libcuda.so.1 /opt/theirs")
        # The path unit may still be working, for the removed package.
        client.ok("systemctl stop gpusession-loader.path gpusession-loader-changed gpusession-loader && echo /opt/theirs >/etc/ld.so.conf.d/theirs.conf && ldconfig")
        client.ok(OURS)
        client.ok("systemctl start gpusession-loader.path")
        client.until(f"! {OURS}", 5)
        said = client.until("journalctl --sync; journalctl -b -u gpusession-loader -o cat | grep 'this machine has'", 5)
        expect(said, "/opt/theirs/libcuda.so.1: its programs keep using it")
        client.ok("rm /etc/ld.so.conf.d/theirs.conf && ldconfig")
        client.until(OURS, 5)
        expect(client.ok("systemctl list-dependencies --plain paths.target"), "gpusession-loader.path")
        client.ok("dpkg -i /root/theirs.deb 2>&1")
        client.fails(OURS)
    with check("setup-libs --force gives our library to the loader nevertheless, and prints the result"):
        expect(client.ok("gpusession setup-libs"), "/libcuda.so.1")
        expect(client.ok("gpusession setup-libs --force"), "programs use /usr/lib/x86_64-linux-gnu/gpusession/libcuda.so.1")
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
        client.ok("gpusession setup-libs --remove && dpkg -P libcuda1 2>&1")
        client.fails(LIBRARY)
        expect(client.ok("gpusession setup-libs"), "programs use")
    client.run("dpkg -P libcuda1")  # also after a failure: the scenarios that follow run programs
    with check("setup-libs --remove is permanent: an upgrade does not give our library to the loader again"):
        client.ok("gpusession setup-libs --remove && dpkg -i /root/debs/gpusession-libs_*.deb 2>&1")
        client.fails(LIBRARY)
        expect(client.ok("gpusession setup-libs"), "programs use")
