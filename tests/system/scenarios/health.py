"""Planted faults, 43 of them: `health` names each, and its remedy helps; 23 are run as printed."""
import contextlib
import json

from harness import Failed, lab

ORDER = 37
GROUP = "users"
# A folder with another vendor's libcuda.so.1, and one that imitates CUDA's folder of stubs.
OTHER, STUBS = "/opt/other", "/opt/cuda/lib64/stubs"
CUT = "/etc/gpusession/conf.d/zz-planted.toml"
DROP_IN = "/etc/systemd/system/{}.service.d/planted.conf"
# The remedy of a finding, also where the fault is held.
PRINTED = object()


class Fault:
    """A fault that the scenario plants.

    `remedy` replaces the finding's remedy, as a command or a function, where that is a sentence.
    `edit` is the change that a person makes to the file, "$1", in the editor that the remedy opens.
    `variables` precede the command `health`, and their absence is the remedy then. `held` plants a
    fault outside of the host, which lasts until the check's end. `after` removes the rest.
    """

    def __init__(self, text, check, words, plant=None, state="fault", remedy=None, edit=None, variables=None, held=None, after=None):
        self.text, self.check, self.words, self.plant, self.state = text, check, words, plant, state
        self.remedy, self.edit, self.variables, self.held, self.after = remedy, edit, variables, held, after


def drop_in(unit, line):
    path = DROP_IN.format(unit)
    return f"mkdir -p $(dirname {path}) && printf '[Service]\\n{line}\\n' >{path} && systemctl daemon-reload"


@contextlib.contextmanager
def black_hole(client, server):
    """Loses full packets without a word, as a path with a smaller MTU and no ICMP does."""
    hosts = [lab.host(host.name) for host in (client, server)]
    for host in hosts:
        lab.offload(host, "off")
    try:
        with server.filters(input="meta length > 1400 drop"):
            yield
    finally:
        client.ok("ip link set dev eth0 mtu 1500")
        for host in hosts:
            lab.offload(host, "on")


def rejoin(client, server):
    """Gives a machine a new identity under its old name, as the remedy says."""
    name = client.ok("cat /root/name")
    client.ok("systemctl stop gpusession && gpusession leave")
    token = server.ok(f"gpuserver clients forget {name} >/dev/null && gpuserver token create --name {name} 2>/dev/null")
    client.ok(f"echo '{token}' | gpusession join gpu1 --name {name} && systemctl start gpusession")


def client_faults(client, server):
    stopped = "systemctl stop gpusession.service gpusession.socket"
    changed = drop_in("gpusession", "Nice=1")
    return [
        Fault("another vendor's library first in LD_LIBRARY_PATH", "library.first", OTHER, variables=f"LD_LIBRARY_PATH={OTHER}"),
        Fault("CUDA's stubs in LD_LIBRARY_PATH", "library.first", "a stub for linking", variables=f"LD_LIBRARY_PATH={STUBS}"),
        Fault("another vendor's library first for the loader", "library.first", f"{OTHER}/libcuda.so.1",
              f"echo {OTHER} >/etc/ld.so.conf.d/000-other.conf && ldconfig"),
        Fault("an NVIDIA driver of the machine's own", "library.own-driver", "driver of its own",
              "mount -t tmpfs planted /proc/driver && mkdir /proc/driver/nvidia", "warning", remedy="umount /proc/driver"),
        Fault("the loader does not search gpusession's folder", "library.loader-file", "/dev/null", "gpusession setup-libs --remove", "warning"),
        Fault("a shell that turned gpusession off", "library.variables", "GPUSESSION_DISABLE=1", variables="GPUSESSION_DISABLE=1"),
        Fault("a shell that hides all GPUs", "library.variables", "hides all GPUs", variables="CUDA_VISIBLE_DEVICES="),
        Fault("a library preloaded into every program", "library.preload", "libcuda", state="warning", variables=f"LD_PRELOAD={OTHER}/libcuda.so.1"),
        Fault("a damaged file for containers", "library.cdi", "no JSON", "mkdir -p /etc/cdi && echo '{' >/etc/cdi/gpusession.json"),
        Fault("a stopped daemon", "login.daemon", "not running", stopped),
        Fault("a masked unit", "login.unit", "masked", f"{stopped}; systemctl mask gpusession.service 2>&1"),
        Fault("a disabled unit", "login.unit", "not enabled", "systemctl disable gpusession 2>&1", "warning"),
        Fault("a unit that a drop-in changes", "login.drop-ins", "planted.conf", changed, "warning"),
        Fault("a socket that somebody deleted", "login.socket", "does not exist", "rm /run/gpusession/grant.sock"),
        Fault("a misspelled key", "login.configuration", CUT, f"printf '[[lease]]\\ngpuss = 1\\n' >{CUT}", edit='rm "$1"'),
        Fault("a configuration that everybody can change", "login.folders", "mode 0777", "chmod 777 /etc/gpusession"),
        Fault("a lease larger than the pool", "login.leases", "waits", f"printf '[[lease]]\\nname = \"large\"\\ngpus = 64\\n' >{CUT} && gpusession reload",
              "warning", remedy=f"rm {CUT} && gpusession reload"),
        Fault("PAM without the module", "login.pam", "no PAM file", "gpusession setup-pam --remove"),
        Fault("a PAM line that ends the session part early", "login.pam-order", "sufficient pam_permit.so",
              "sed -i '1i session sufficient pam_permit.so' /etc/pam.d/common-session", remedy="sed -i '/sufficient pam_permit.so/d' /etc/pam.d/common-session"),
        Fault("a PAM module that is gone", "login.pam-module", "not installed", "rm /usr/lib/x86_64-linux-gnu/security/pam_gpusession.so",
              remedy="dpkg -i /root/debs/libpam-gpusession_*.deb"),
        Fault("a profile that is gone", "login.profile", "gpusession.sh", "rm /etc/profile.d/gpusession.sh", "warning",
              remedy="dpkg -i --force-confmiss /root/debs/gpusession_*.deb"),
        Fault("a server that no name service knows", "network.names", "nonesuch.invalid",
              "cp /etc/gpusession/servers.toml /root/ && printf '\\n[[server]]\\naddress = \"nonesuch.invalid\"\\n' >>/etc/gpusession/servers.toml && gpusession reload",
              edit='cp /root/servers.toml "$1"'),
        Fault("a firewall that rejects the control port", "network.control-port", "refuses", held=lambda: server.refuses(7601)),
        Fault("a firewall that drops the control port", "network.control-port", "does not answer", held=lambda: server.filters(input="tcp dport 7601 drop")),
        Fault("a firewall that rejects the data port", "network.data-port", "refuses", held=lambda: server.refuses(7602)),
        Fault("a path that loses full packets", "network.packets", "MTU black hole", remedy=PRINTED, held=lambda: black_hole(client, server)),
        Fault("a clock that is an hour ahead", "network.clock", "behind this one", variables="faketime -f +1h"),
        Fault("a certificate that has ended", "network.certificate", "ended",
              "openssl x509 -in /var/lib/gpusession/identity/client.pem -noout -subject -nameopt multiline | sed -n 's/.*commonName *= //p' >/root/name && test -s /root/name"
              " && cd /var/lib/gpusession/identity && faketime '2020-01-01' openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=x -keyout /dev/null -out client.pem 2>/dev/null",
              remedy=lambda: rejoin(client, server)),
        Fault("a damaged certificate", "network.certificate", "no certificate",
              "cd /var/lib/gpusession/identity && cp -p client.pem /root/client.pem && echo x >client.pem",
              remedy="cp -p /root/client.pem /var/lib/gpusession/identity/"),
        Fault("few open files", "host.open-files", "64 open files", variables="ulimit -n 64;"),
        Fault("an address space that is too small", "host.address-space", "address space of at most", variables="ulimit -v 8000000;"),
        Fault("a full disk", "host.disk", "/tmp", "mount -t tmpfs -o size=4m planted /tmp", remedy="umount /tmp"),
    ]


def server_faults():
    stack, locked, store = (drop_in("gpuserver", line) for line in ("LimitSTACK=8388608", "LimitMEMLOCK=65536", "FileDescriptorStoreMax=0"))
    folder = "/etc/systemd/system/gpuserver.service.d"
    as_before = f"rm {folder}/planted.conf {folder}/zz-*.conf && systemctl daemon-reload"
    bad = "/etc/gpusession/gpuserver.d/zz-planted.toml"
    return [
        Fault("a server that drains", "server.answers", "gives no new leases", "gpuserver drain", "warning"),
        Fault("a misspelled key of the server", "server.configuration", bad, f"echo 'wram_workers = 1' >{bad}", edit='rm "$1"'),
        Fault("a card that is switched off", "server.cards", "card 0", "gpuserver off 0", "warning"),
        Fault("a state folder that everybody can read", "server.state-folder", "mode 0755", "chmod 755 /var/lib/gpuserver"),
        Fault("a signer that does not start", "server.signer", "gpuserver-ca.socket is inactive", "systemctl stop gpuserver-ca.socket gpuserver-ca.service 2>&1"),
        Fault("a starter that does not start", "server.starter", "gpuserver-worker.socket is inactive", "systemctl stop gpuserver-worker.socket gpuserver-worker.service 2>&1"),
        Fault("a small stack", "server.stack", "LimitSTACK=8388608", stack, after=as_before),
        Fault("too little locked memory", "gpu-host.locked-memory", "65536 bytes", locked, after=as_before),
        Fault("a server without a cache", "server.cache", "compiles its code again", f"echo 'cache_max = 0' >{bad}", "warning", edit='rm "$1"'),
        Fault("a data port that other programs may get", "server.ports", "port 40000", f"echo 'data_ports = 40000' >{bad}", "warning",
              # A container may not set this value.
              remedy=f"rm {bad}"),
        Fault("no store for descriptors", "server.descriptor-store", "FileDescriptorStoreMax=0", store, after=as_before),
        Fault("a stopped server", "server.answers", "no gpuserver answers", "systemctl stop gpuserver"),
    ]


def found(host, command, check, variables=None):
    """Returns a finding of `health`."""
    told = host.run(f"{variables or ''} {command} health --all --json")
    try:
        rows = json.loads(told.out[told.out.index("{"):told.out.rindex("}") + 1])["checks"]
    except ValueError:
        raise Failed(f"{told}\nis no JSON")
    return next(row for row in rows if row["id"] == check)


def run(site, check):
    client, server = site.client, site.servers[0]
    for host in (client, server):
        host.write("/usr/local/bin/sudo", '#!/bin/sh\nexec "$@"\n', "755")
    for folder in (OTHER, STUBS):
        client.ok(f"mkdir -p {folder}")
        client.push([site.sim_library()], folder)
    for host, command, faults in ((client, "gpusession", client_faults(client, server)), (server, "gpuserver", server_faults())):
        for fault in faults:
            with check(f"{fault.text}: {fault.check}"):
                plant(host, command, fault)
    # The link of `setup-libs` is an administrator's choice, which stays; later checks expect the
    # package's own.
    client.ok("ln -sfn ../../usr/share/gpusession/ld.so.conf /etc/ld.so.conf.d/gpusession.conf && ldconfig")
    for host in (client, server):
        host.ok("rm -f /usr/local/bin/sudoedit")
    with check("afterwards a login runs a program"):
        client.until("gpusession status | grep -q 'is ready'", 60)
        client.ok("ssh alice@client vectorAdd")


def plant(host, command, fault):
    before = found(host, command, fault.check)
    if before["state"] == fault.state and fault.words in before["found"]:
        raise Failed(f"the finding is there before the fault: {before}")
    with fault.held() if fault.held else contextlib.nullcontext():
        if fault.plant:
            host.ok(fault.plant)
        row = found(host, command, fault.check, fault.variables)
        if row["state"] != fault.state or fault.words not in row["found"] or not row["remedy"]:
            raise Failed(f"{row} is not {fault.state} with {fault.words!r} and a remedy")
        printed = fault.remedy is PRINTED or fault.plant and not fault.remedy
        remedy = row["remedy"] if printed else fault.remedy
        if remedy:
            if fault.edit:
                host.write("/usr/local/bin/sudoedit", f"#!/bin/sh\n{fault.edit}\n", "755")
            remedy() if callable(remedy) else host.ok(remedy)
            helps(host, command, fault, remedy)
    if fault.after:
        host.ok(fault.after)
    helps(host, command, fault, "the end of the fault")


def helps(host, command, fault, remedy):
    # A server that is restarted or reachable again takes a moment.
    for _ in range(100):
        after = found(host, command, fault.check)
        if after["state"] != fault.state or fault.words not in after["found"]:
            return
    raise Failed(f"after {remedy!r}: {after}")
