"""D-Bus as an administrator sees it with busctl: tree, introspection, calls and a monitor."""
import json
import re
import time
import xml.etree.ElementTree as xml

from harness import ROOT, Failed, expect
from scenarios.policy import lease

ORDER = 32
GROUP = "users"
PATH = "/org/gpusession1"
MANAGER = f"org.gpusession1 {PATH} org.gpusession1.Manager"


def escaped(text):
    """Escapes an element of a path as sd-bus does, which includes a leading digit."""
    return re.sub("[^A-Za-z0-9]|^[0-9]", lambda m: f"_{ord(m[0]):02x}", text)


def introspected(text):
    """Returns busctl's introspection of an object, as {interface: {name: (kind, signature)}}."""
    found, members = {}, None
    for line in text.splitlines()[1:]:
        name, kind, signature = line.split()[:3]
        if kind == "interface":
            members = found.setdefault(name, {})
        else:
            members[name.removeprefix(".")] = (kind, signature)
    return found


def shipped(interface):
    """Returns the content of an interface's file in the form of `introspected`."""
    def signature(element, direction):
        return "".join(a.get("type") for a in element.findall("arg") if a.get("direction", "out") == direction) or "-"
    root = xml.parse(ROOT / f"units/dbus-1/interfaces/{interface}.xml").getroot().find("interface")
    return {e.get("name"): (e.tag, e.get("type") if e.tag == "property" else signature(e, "in" if e.tag == "method" else "out"))
            for e in root if e.tag in ("method", "property", "signal")}


# A lease that does not fit next to everyone's half of both GPUs, and one that does.
TOO_MUCH = '[[lease]]\nname = "more"\ngpus = 2\nmemory = "60%"\n'
ENOUGH = '[[lease]]\nname = "more"\nmemory = "10%"\n'
MORE = "/etc/gpusession/conf.d/more.toml"
# Records the bus traffic in /run/signals.out.
MONITOR = "stdbuf -oL busctl monitor --json=short org.gpusession1"


def until(test, seconds, what):
    """Repeats a test until it returns a true value."""
    begin = time.monotonic()
    while not test():
        if time.monotonic() - begin > seconds:
            raise Failed(f"not within {seconds} s: {what()}")
        time.sleep(0.1)


class Watched:
    """An object's properties: announcements since this was created, and values of calls."""

    def __init__(self, client, interface, path):
        self.client, self.interface, self.path = client, f"org.gpusession1.{interface}", path
        self.before = len(self.lines())

    def lines(self):
        # The last line may be incomplete.
        return self.client.ok("grep '^{.*}$' /run/signals.out || true").splitlines()

    def said(self, name):
        """Returns the announced values, in their order."""
        values = []
        for line in self.lines()[self.before:]:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("member") == "PropertiesChanged" and message["path"] == self.path:
                interface, changed, _ = message["payload"]["data"]
                if interface == self.interface and name in changed:
                    values.append(changed[name]["data"])
        return values

    def get(self, name):
        return json.loads(self.client.ok(f"busctl --json=short get-property org.gpusession1 {self.path} {self.interface} {name}"))["data"]

    def comes(self, seconds=20, **wanted):
        """Waits until each property is announced with its value, and a call returns the same.

        A function instead of a value accepts or refuses the announced value.
        """
        for name, value in wanted.items():
            right = value if callable(value) else lambda said, value=value: said == value
            until(lambda: any(map(right, self.said(name)[-1:])), seconds, lambda: f"{name} of {self.path}: announced {self.said(name)}")
        for name in wanted:
            # The property may change between the two, and is then announced again.
            until(lambda: self.said(name)[-1] == self.get(name), 5,
                  lambda: f"{name} of {self.path}: announced {self.said(name)}, and is {self.get(name)!r}")


def changes(site, check, id):
    """Each change of a property is announced, with the value that a call then returns."""
    client, server = site.client, site.servers[0]

    def watched(interface, path):
        return Watched(client, interface, path)

    def leases(*text):
        client.write(MORE, "".join(text)) if text else client.ok(f"rm -f {MORE}")
        client.ok("systemctl reload gpusession")

    client.start("signals", MONITOR)
    client.until("grep Monitoring /run/signals.out", 10)
    everyones = f"{PATH}/lease/{escaped(id)}"
    with check("LeasesMax is announced when a reload changes it"):
        manager = watched("Manager", PATH)
        leases("[access]\nextra_leases = 3\n")
        manager.comes(LeasesMax=3)
        leases()
        manager.comes(LeasesMax=0)
    with check("a lease that waits: the manager's State and PoolTarget, and its own place and reason, are announced"):
        manager, waits, held = watched("Manager", PATH), watched("Lease", f"{PATH}/lease/more"), manager.get("NCurrentLeases")
        leases(TOO_MUCH)
        manager.comes(State="degraded", PoolTarget=4)
        waits.comes(WaitsFor=lambda said: "GPU" in said, QueuePosition=[1, 1])
        assert not manager.said("PoolReady") and not manager.said("NCurrentLeases"), "no further lease is held"
    with check("when a lease begins or ends, the manager's counts and Leases of its GPU are announced"):
        manager, gpu = watched("Manager", PATH), watched("Device", None)
        leases(ENOUGH)
        manager.comes(State="ready", PoolTarget=3, PoolReady=3, NCurrentLeases=held + 1)
        mores = f"{PATH}/lease/{escaped(lease(client, 'more'))}"
        # One of the two GPUs of everyone's lease.
        gpu.path, = watched("Lease", mores).get("Devices")
        gpu.comes(Leases=lambda said: sorted(said) == sorted([everyones, mores]))
        leases()
        manager.comes(PoolTarget=2, PoolReady=2, NCurrentLeases=held)
        gpu.comes(Leases=[everyones])
    with check("State, IdleSinceHint and similar properties of a lease are announced when a program starts or exits"):
        own = watched("Lease", everyones)
        until(lambda: own.get("State") == "idle", 20, lambda: own.get("State"))
        own = watched("Lease", everyones)
        client.start("program", "longRun 120", user="alice")
        own.comes(State="active", IdleSinceHint=0, IdleSinceHintMonotonic=0)
        client.ok("systemctl stop program")
        own.comes(30, State="idle", IdleSinceHintMonotonic=lambda said: said > 0)
        assert own.said("IdleSinceHint")[-1] > 0, own.said("IdleSinceHint")
    with check("Server.State and the manager's State are announced when a server's cable is cut and when it is restored"):
        away, manager = watched("Server", f"{PATH}/server/gpu1"), watched("Manager", PATH)
        server.lab("cut", "--silent")
        try:
            away.comes(10, State="suspect")
            manager.comes(State="offline")
        finally:
            server.lab("heal")
        away.comes(60, State="online")
        manager.comes(State="ready")
        assert away.said("State") == ["suspect", "online"], away.said("State")
        assert lease(client, "everyone") == id, "its lease continues"
    with check("Server.State is announced when a server is stopped and when it is started"):
        away = watched("Server", f"{PATH}/server/gpu1")
        server.ok("systemctl stop gpuserver", timeout=120)
        away.comes(30, State="stopped")
        assert "suspect" not in away.said("State"), away.said("State")
        server.ok("systemctl start gpuserver")
        away.comes(60, State="online")
        client.until("gpusession status | grep -q 'is ready'", 20)
        assert lease(client, "everyone") == id, "its lease continues"
    with check("after a restart the daemon announces what it learns: State, PoolReady, BootAllocationComplete, the servers' times"):
        manager = watched("Manager", PATH)
        client.ok("systemctl restart gpusession")
        manager.comes(State="ready", PoolReady=2, BootAllocationComplete=True, LeaseTTLUSec=lambda said: said > 0,
                      DefaultIdleTimeoutUSec=30 * 60 * 1_000_000)
    client.ok("systemctl stop signals program; true")


def run(site, check):
    client = site.client
    id = lease(client, "everyone")
    gpus = [d["uuid"] for d in json.loads(client.ok("gpusession list --json"))["leases"][0]["devices"]]
    devices = [f"{PATH}/device/{escaped(gpu)}" for gpu in gpus]
    objects = {"Manager": PATH, "Lease": f"{PATH}/lease/{escaped(id)}", "Device": devices[0], "Server": f"{PATH}/server/gpu1"}
    with check("busctl tree shows the manager, and an object for each lease, GPU and server"):
        seen = client.ok("busctl tree --list org.gpusession1").split()
        wanted = [*(f"{PATH}/{kind}" for kind in ("device", "lease", "server")), *objects.values(), *devices]
        assert sorted(set(seen) - {"/", "/org"}) == sorted(set(wanted)), seen
    for name, path in objects.items():
        with check(f"busctl introspect matches the file of {name}"):
            interface = f"org.gpusession1.{name}"
            seen = introspected(client.ok(f"busctl introspect org.gpusession1 {path} --no-pager"))[interface]
            wanted = shipped(interface)
            assert wanted and seen == wanted, f"{sorted(set(seen.items()) ^ set(wanted.items()))}"
    with check("busctl call: lists, properties, and an error that states the cause"):
        expect(client.ok(f"busctl call {MANAGER} ListLeases"), f'a(susot) 1 "{id}" 4294967295 ')
        seen = client.ok(f"busctl call {MANAGER} ListDevices")
        assert all(gpu in seen for gpu in gpus) and seen.startswith("a(ssso) 2 "), seen
        expect(client.ok(f"busctl call {MANAGER} ListServers"), 'a(ssso) 1 "gpu1" "gpu1:7601" "online" "/org/gpusession1/server/gpu1"')
        assert client.ok(f"busctl call {MANAGER} GetLease s {id}") == f'o "{objects["Lease"]}"'
        expect(client.fails(f"busctl call {MANAGER} GetLease s nosuch"), "Call failed: lease nosuch: not found")
        seen = client.ok(f"busctl get-property {MANAGER} State PoolTarget PoolReady BootAllocationComplete")
        assert seen.split() == ["s", '"ready"', "u", "2", "u", "2", "b", "true"], seen
        expect(client.ok(f"su -l alice -c 'busctl call {MANAGER} ListLeases'"), id)
    with check("the bus lets no user own the daemon's name, or call methods that the daemon does not offer"):
        for call in ("call org.freedesktop.DBus /org/freedesktop/DBus org.freedesktop.DBus RequestName su org.gpusession1 0",
                     f"set-property {MANAGER} LeasesMax t 9"):
            seen = client.fails(f"busctl {call}", user="alice")
            assert "not allowed" in seen or "denied" in seen, seen
    with check("busctl monitor shows a lease begin and end, each object before its signal, and no signal of a removed lease"):
        client.start("monitor", "stdbuf -oL busctl monitor --json=short org.gpusession1")
        client.until("grep Monitoring /run/monitor.out", 10)
        new = client.ok("gpusession run --new -m 10% -- printenv GPUSESSION_LEASE")
        client.until(f"grep LeaseRemoved /run/monitor.out | grep {new}", 10)
        seen = []
        for line in client.ok("grep '^{' /run/monitor.out").splitlines():
            message = json.loads(line)
            if message.get("type") == "signal" and (new in line or escaped(new) in line):
                seen.append(message["member"])
        order = [seen.index(name) for name in ("InterfacesAdded", "LeaseNew", "LeaseRemoved")]
        if order != sorted(order) or set(seen[seen.index("LeaseRemoved") + 1:]) - {"InterfacesRemoved"}:
            raise Failed(seen)
        client.ok("systemctl stop monitor; true")
    changes(site, check, id)
    with check("a call starts a stopped daemon"):
        client.ok("systemctl stop gpusession.service gpusession.socket")
        expect(client.ok(f"busctl call {MANAGER} Describe"), "schema")
        client.ok("systemctl is-active gpusession.service gpusession.socket")
        client.until("gpusession status | grep -q 'is ready'", 20)
