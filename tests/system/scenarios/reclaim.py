"""Time until device memory is free again, for each way in which a program ends."""
import json
import subprocess
import tempfile
import time
from pathlib import Path

from harness import Failed, expect

ORDER = 45
GROUP = "faults"
# Bound, in seconds, if the program's machine is alive; the bound of a silent machine adds the time
# within which it may come back.
BOUND, SILENT = 2, 62
# Bound for the program of a silent server: the time until it is given up, and the interval of the
# check.
TOLD = 65 + 15 + 5
# Bound for a machine with another boot, which is believed 10 s after the last message of the
# previous one.
REBOOT = 14
# Replaces the program's end: killVictim waits in pause() with its memory in use.
ENDINGS = r"""
#include <stdlib.h>
#include <unistd.h>
int pause(void) {
    const char *end = getenv("END");
    if (*end == 'f' && fork() == 0) for (;;) sleep(1000);
    while (access("/tmp/end", F_OK)) usleep(1000);
    if (*end == 'a') abort();
    if (*end == 'x') execlp("sleep", "sleep", "1000", (char *)0);
    exit(0);
}
"""


class Program:
    """killVictim with 256 MiB of device memory, and its worker on a server."""

    def __init__(self, site, ending=None):
        self.client = site.client
        self.client.ok("rm -f /tmp/end")
        preload = f"END={ending} LD_PRELOAD=/usr/local/lib/endings.so " if ending else ""
        self.client.start("victim", f"{preload}killVictim 256", user="alice")
        self.client.until("grep -q READY /run/victim.out", 20, what="killVictim")
        self.pid = int(self.client.ok("pgrep -o -x killVictim"))
        for self.server in site.servers:
            rows = json.loads(self.server.run("gpuserver ps --json 2>/dev/null").out or "{}").get("workers", [])
            mine = [r for r in rows if r["client_pid"] == self.pid and r["program"] == "killVictim"]
            if mine:
                break
        else:
            raise Failed("no server has its worker")
        if mine[0]["memory_bytes"] < 256 << 20:
            raise Failed(f"its memory is not counted: {mine[0]}")
        # Ends with the time of day when the worker, and its memory with it, is gone. All hosts
        # share one kernel and one clock.
        self.server.start("watch", f"while kill -0 {mine[0]['pid']} 2>/dev/null; do sleep 0.002; done; date +%s.%N")

    def reclaimed(self, begin, bound):
        """Returns the seconds from `begin` until the worker had exited."""
        end = self.server.until("grep . /run/watch.out", bound + 30, what="the worker's end")
        took = float(end) - begin
        if took > bound:
            raise Failed(f"{took:.2f} s, more than {bound} s")
        return f"{took:.2f} s"


def run(site, check):
    client = site.client
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "endings.c")
        source.write_text(ENDINGS)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
        client.push([source.with_suffix(".so")], "/usr/local/lib")

    def now_and(command):
        """Runs a command on the client, and returns the time of its start."""
        return float(client.ok(f"date +%s.%N; {command}").split()[0])

    causes = {
        "exit": ("exit", lambda p: now_and("touch /tmp/end")),
        "abort": ("abort", lambda p: now_and("touch /tmp/end")),
        "exec of another program": ("x", lambda p: now_and("touch /tmp/end")),
        "kill -9": (None, lambda p: now_and(f"kill -9 {p.pid}")),
        "a fork that outlives its parent": ("fork", lambda p: now_and(f"kill -9 {p.pid}")),
    }
    for name, (ending, cause) in causes.items():
        with check(f"{name}: within {BOUND} s") as note:
            program = Program(site, ending)
            note(program.reclaimed(cause(program), BOUND))
            client.run("pkill -9 -x killVictim; systemctl stop victim")
    with check(f"the server is stopped without waiting for programs: within {BOUND} s") as note:
        program = Program(site)
        server = program.server
        begin = float(server.ok("date +%s.%N; gpuserver stop --force").split()[0])
        note(program.reclaimed(begin, BOUND))
        shown = server.ok("systemctl show -p ExecMainStatus -p NRestarts gpuserver")
        expect(shown, "ExecMainStatus=2", "forced")
        expect(shown, "NRestarts=0", "the server was not started again")
        server.ok("systemctl reset-failed gpuserver; systemctl start gpuserver")
        client.until("vectorAdd", 60, user="alice")
    with check(f"the client is silent, with its cable cut: within {SILENT} s") as note:
        program = Program(site)
        client.start("working", "longRun 600", user="alice")
        program.server.until("gpuserver ps | grep longRun", 20)
        client.lab("cut", "--silent")
        begin = time.time()
        note(program.reclaimed(begin, SILENT))
    with check(f"a working program gets an error within {TOLD} s") as note:
        said = client.until("grep FAILED /run/working.out", TOLD - (time.time() - begin), what="its end")
        note(f"{time.time() - begin:.0f} s")
        expect(said, "cudaErrorDevicesUnavailable", "the error")
    with check("the client has GPUs again when the network is back"):
        client.lab("heal")
        client.ok("pkill -9 -x killVictim; systemctl stop victim || true")
        client.until("vectorAdd", 60, user="alice")
    with check("the client's journal reports that the server did not answer, and that it answers again"):
        for id, text in (("6ff34f01d228494abdf676921495ecad", "A GPU server does not answer"),
                         ("e377d21fb9aa491e9c2ccdce898d5c6f", "A GPU server answers again")):
            expect(client.until(f"journalctl -b -x -t gpusessiond MESSAGE_ID={id} --no-pager | grep -A9 Subject", 10), text)
    with check(f"power loss of the client, which stays off: within {SILENT} s") as note:
        program = Program(site)
        client.lab("kill")
        note(program.reclaimed(time.time(), SILENT))
        client.lab("start")
        client.until("vectorAdd", 60, user="alice")
    with check(f"power loss of the client, which boots again at once: within {REBOOT} s") as note:
        program = Program(site)
        client.lab("kill")
        begin = time.time()
        client.lab("start")
        note(program.reclaimed(begin, REBOOT))
        client.until("vectorAdd", 60, user="alice")
    with check("no program is left on the servers"):
        for server in site.servers:
            if server.run("systemctl is-active gpuserver").code:
                continue
            server.until("gpuserver ps --json | python3 -c \"import json, sys; "
                         "sys.exit(any(w['program'] for w in json.load(sys.stdin)['workers']))\"", 10, server.name)
