"""Each verb of both programs, as root and as an ordinary user, in each state of a site.

The screens lie in `target/system/screens`, for people.
"""
import contextlib
import json

from harness import ROOT, Failed

ORDER = 38
GROUP = "users"
SCREENS = ROOT / "target/system/screens"
USERS = ("root", "alice")
STATES = ("all up", "a server down", "no server", "no daemon")
# Text that no screen may have.
NEVER = ("panicked", "RUST_BACKTRACE", "Os {", "Some(", "None,", "DBus.Error", "org.freedesktop")

OK = (0,)
# Verbs without effect on the site, and their exit codes in the order of STATES. A pair of codes is
# that of root and that of alice.
CLIENT = {
    "--help": (OK, OK, OK, OK),
    "status": (OK, OK, OK, (69,)),
    "list": (OK, OK, OK, (69,)),
    "list --mine": (OK, OK, OK, (69,)),
    # Root reads the daemon's identity, and asks the servers itself.
    "smi": (OK, OK, OK, (OK, (69,))),
    "stats": (OK, OK, OK, (OK, (69,))),
    "health": (OK, (1,), (1,), ((1,), (69,))),
    # 1: programs of this shell wait for a GPU, once the daemon has noticed.
    "health --local": (OK, OK, (0, 1), (1,)),
    # 75: this machine measured in the last minute.
    "netperf --seconds 1 --lanes 1": ((0, 75), (0, 75), (69,), ((0, 75), (69,))),
    "report --list": (OK, OK, OK, OK),
    "env": (OK, OK, OK, (69,)),
    "env --explain": (OK, OK, OK, (69,)),
    "run -- true": (OK, OK, OK, (125,)),
    "run --new --memory 10% -- true": ((OK, (125,)), (OK, (125,)), (125,), (125,)),
    "local -- true": ((125,), (125,), (125,), (125,)),
    "request --memory 10% -o /tmp/verbs.toml": ((OK, (77,)), (OK, (77,)), ((69, 75), (77,)), (69,)),
    "release abcdefghijkl": ((1,), (1,), (1,), (69,)),
    "park abcdefghijkl": ((1,), (1,), (1,), (69,)),
    "unpark abcdefghijkl": ((1,), (1,), (1,), (69,)),
    "reload": ((OK, (77,)), (OK, (77,)), (OK, (77,)), (69,)),
    "cache show": (OK, OK, OK, OK),
    "cdi": (OK, OK, OK, OK),
    "join gpu1 gpsj-x": ((78,), (78,), (78,), (78,)),
    "leave": (((1,), (78,)), ((1,), (78,)), ((1,), (78,)), None),
    # Root's call is a decision that later installations of other libraries keep.
    "setup-libs": ((None, (77,)),) * 4,
    "setup-pam": ((None, (77,)),) * 4,
}
WITHOUT_JSON = ("--help", "run -- true", "run --new --memory 10% -- true", "local -- true", "cdi")
# In the order of SERVER_STATES: that of a server that runs, and of one that does not.
SERVER_STATES = ("running", "stopped")
ASKS, READS = ((OK, (1,)), (1,)), ((OK, (1,)), (OK, (1,)))
SERVER = {
    "--help": (OK, OK),
    **{verb: ASKS for verb in ("status", "ps", "ps --threads", "leases", "gpus", "queue", "limits", "top -n 1", "drain --end", "on 0")},
    **{verb: ((1,), (1,)) for verb in ("park abc", "kill abc", "fleet token gpsf-x --name vm-7")},
    **{verb: READS for verb in ("stats", "stats --users", "accounting", "audit", "clients", "token list", "admin list")},
    # A server that does not run has no file of changes, which only root reads.
    **{verb: ((OK, (1,)), OK) for verb in ("config get", "config diff", "check-config", "check-isolation")},
    "mps": ((1,), (1,)),
    "health": ((OK, (77,)), (69,)),
    "report --list": (OK, OK),
}


def codes(expected, user):
    """Returns the exit codes of a user."""
    if isinstance(expected[-1], tuple):
        return expected[USERS.index(user)]
    return expected


def look(host, program, verbs, column, name, user):
    """Runs all verbs, and returns what is wrong with their exit codes and screens."""
    wrong, screens = [], []
    for verb, expected in verbs.items():
        if expected[column] is None:
            continue
        wanted = codes(expected[column], user)
        if wanted is None:
            continue
        seen = host.run(f"{program} {verb}", user=None if user == "root" else user)
        screens.append(f"{user}@{host.name}$ {program} {verb}\n{seen.out}\n[{seen.code}]\n")
        if seen.code not in wanted:
            wrong.append(f"{seen}, not {wanted}")
        wrong += [f"{seen}\nhas {text!r}" for text in NEVER if text in seen.out]
        if seen.code and not seen.out:
            wrong.append(f"{seen}\nprints nothing")
        if verb in WITHOUT_JSON:
            continue
        seen = host.run(f"{program} --json {verb} 2>/dev/null", user=None if user == "root" else user)
        with contextlib.suppress(ValueError, IndexError):
            value = json.loads(seen.out)
            if value["schema"] == 1 and (seen.code in (0, 1) or "error" in value or "checks" in value):
                continue
        wrong.append(f"{seen}\nis no JSON with a schema")
    SCREENS.mkdir(parents=True, exist_ok=True)
    (SCREENS / f"{program} {name}, {user}.txt").write_text("\n".join(screens))
    return wrong


def run(site, check):
    client, (first, second) = site.client, site.servers
    kept = client.ok("cat /etc/gpusession/servers.toml")
    client.write("/etc/gpusession/servers.toml", '[[server]]\naddress = "gpu1"\n[[server]]\naddress = "gpu2"\n')
    second.ok("systemctl start gpuserver")
    client.ok("gpusession reload")
    steps = {
        "all up": [],
        "a server down": [(second, "systemctl stop gpuserver")],
        "no server": [(first, "systemctl stop gpuserver")],
        "no daemon": [(first, "systemctl start gpuserver"), (second, "systemctl start gpuserver"), (client, "systemctl stop gpusession.service gpusession.socket")],
    }
    client.until("gpusession status | grep -q 'is ready'", 60)
    client.until("gpusession smi | grep -q gpu2", 60)
    for column, state in enumerate(SERVER_STATES):
        server = (first, second)[column]
        if state == "stopped":
            server.ok("systemctl stop gpuserver")
        for user in USERS:
            with check(f"{state}: verbs of gpuserver for {user}"):
                if wrong := look(server, "gpuserver", SERVER, column, state, user):
                    raise Failed("\n\n".join(wrong))
        if state == "stopped":
            server.ok("systemctl start gpuserver")
            client.until("gpusession smi | grep -q ^gpu2", 60)
    for column, state in enumerate(STATES):
        for host, command in steps[state]:
            host.ok(command)
        if state == "all up":
            with check("smi --watch repeats until it is interrupted"):
                seen = client.run("timeout -s INT 7 gpusession smi --watch; gpusession --json smi --loop 1 | head -n 2", user="alice")
                assert seen.out.count("\nSERVER") + seen.out.startswith("SERVER") >= 2, seen
                assert [json.loads(line)["schema"] for line in seen.out.splitlines()[-2:]] == [1, 1], seen
        for user in USERS:
            with check(f"{state}: verbs of gpusession for {user}"):
                wrong = look(client, "gpusession", CLIENT, column, state, user)
                client.run("gpusession release /tmp/verbs.toml; rm -f /tmp/verbs.toml")
                if wrong:
                    raise Failed("\n\n".join(wrong))
    client.write("/etc/gpusession/servers.toml", kept + "\n")
    client.ok("systemctl start gpusession")
    second.ok("systemctl stop gpuserver")
    with check("afterwards the machine has its GPUs again"):
        client.until("gpusession status | grep -q 'is ready'", 90)
