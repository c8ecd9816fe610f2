"""D-Bus as an administrator reads it with busctl: tree, introspection, calls, and what a monitor shows."""
import json
import re
import xml.etree.ElementTree as xml

from harness import ROOT, Failed, expect
from scenarios.policy import lease

ORDER = 32
PATH = "/org/gpusession1"
MANAGER = f"org.gpusession1 {PATH} org.gpusession1.Manager"


def escaped(text):
    """A path's element, as sd-bus escapes it: no digit in front either."""
    return re.sub("[^A-Za-z0-9]|^[0-9]", lambda m: f"_{ord(m[0]):02x}", text)


def introspected(text):
    """What busctl shows of an object, as {interface: {name: (kind, signature)}}."""
    found, members = {}, None
    for line in text.splitlines()[1:]:
        name, kind, signature = line.split()[:3]
        if kind == "interface":
            members = found.setdefault(name, {})
        else:
            members[name.removeprefix(".")] = (kind, signature)
    return found


def shipped(interface):
    """The same, as the interface's file has it."""
    def signature(element, direction):
        return "".join(a.get("type") for a in element.findall("arg") if a.get("direction", "out") == direction) or "-"
    root = xml.parse(ROOT / f"units/dbus-1/interfaces/{interface}.xml").getroot().find("interface")
    return {e.get("name"): (e.tag, e.get("type") if e.tag == "property" else signature(e, "in" if e.tag == "method" else "out"))
            for e in root if e.tag in ("method", "property", "signal")}


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
        with check(f"busctl introspect shows what the file of {name} says"):
            interface = f"org.gpusession1.{name}"
            seen = introspected(client.ok(f"busctl introspect org.gpusession1 {path} --no-pager"))[interface]
            wanted = shipped(interface)
            assert wanted and seen == wanted, f"{sorted(set(seen.items()) ^ set(wanted.items()))}"
    with check("busctl call: lists, properties, and an error that says what is wrong"):
        expect(client.ok(f"busctl call {MANAGER} ListLeases"), f'a(susot) 1 "{id}" 4294967295 ')
        seen = client.ok(f"busctl call {MANAGER} ListDevices")
        assert all(gpu in seen for gpu in gpus) and seen.startswith("a(ssso) 2 "), seen
        expect(client.ok(f"busctl call {MANAGER} ListServers"), 'a(ssso) 1 "gpu1" "gpu1:7601" "online" "/org/gpusession1/server/gpu1"')
        assert client.ok(f"busctl call {MANAGER} GetLease s {id}") == f'o "{objects["Lease"]}"'
        expect(client.fails(f"busctl call {MANAGER} GetLease s nosuch"), "Call failed: there is no lease nosuch")
        seen = client.ok(f"busctl get-property {MANAGER} State PoolTarget PoolReady BootAllocationComplete")
        assert seen.split() == ["s", '"ready"', "u", "2", "u", "2", "b", "true"], seen
        expect(client.ok(f"su -l alice -c 'busctl call {MANAGER} ListLeases'"), id)
    with check("busctl monitor shows a lease come and go, each object before its signal, and nothing of a lease that is gone"):
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
    with check("a call starts a daemon that is stopped"):
        client.ok("systemctl stop gpusession.service gpusession.socket")
        expect(client.ok(f"busctl call {MANAGER} Describe"), "schema")
        client.ok("systemctl is-active gpusession.service gpusession.socket")
        client.until("gpusession status | grep -q 'is ready'", 20)
