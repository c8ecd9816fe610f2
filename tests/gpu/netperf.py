"""`./run netperf`: `gpusession netperf` against a program's copies on the same connections."""

import json
import time

from processes import progress

# Largest difference to the copies before and after, as a part of them.
TOLERANCE = 0.1
# A server measures for a client once in this many seconds.
PAUSE = 61


class Netperf:
    """Compares each direction; other work of the machine may disturb all but one round."""

    def __init__(self, args, server, runner, here):
        self.args, self.server, self.runner, self.here = args, server, runner, here
        self.rounds = []

    def copies(self):
        """Returns the rates of pinned copies."""
        done = self.runner.run("remote", "copy-rates", [self.args.python, "copy_rates.py", "64"], 60)
        if failure := done.failure():
            raise RuntimeError(f"copy_rates: {failure}")
        return json.loads(done.out)

    def measured(self):
        """Returns the rates that netperf reports for a program."""
        tool = [str(self.here / "bin/gpusession"), "netperf", f"127.0.0.1:{self.args.port}", "--seconds", "6", "--json"]
        done = self.runner.run("client", "netperf", tool, 60, env=self.server.client_environment())
        if failure := done.failure():
            raise RuntimeError(f"netperf: {failure}")
        report = json.loads(done.out)
        mine = report["programs"]["encrypted"], report["programs"]["lanes"]
        series = next(run for run in report["runs"] if (run["encrypted"], run["lanes"]) == mine)
        return {way: series[way]["bytes_per_s"] for way in ("to_server", "from_server")}

    def round(self):
        """Measures once; returns whether both directions are within the tolerance."""
        before, netperf, after = self.copies(), self.measured(), self.copies()
        self.rounds.append({"copies": [before, after], "netperf": netperf})
        good = True
        for way, rate in netperf.items():
            slow, fast = sorted((before[way], after[way]))
            within = (1 - TOLERANCE) * slow <= rate <= (1 + TOLERANCE) * fast
            progress(f"  netperf {way:12} {rate / 1e9:6.2f} GB/s, copies {slow / 1e9:6.2f} to {fast / 1e9:6.2f} GB/s {'ok' if within else 'differs'}")
            good = good and within
        return good

    def run(self):
        """Measures until a round agrees."""
        begun = -PAUSE
        for _ in range(self.args.repeat):
            time.sleep(max(0, begun + PAUSE - time.monotonic()))
            begun = time.monotonic()
            if self.round():
                return {"rounds": self.rounds, "failed": False}
        return {"rounds": self.rounds, "failed": True}

    def stop(self):
        """Has no effect: a round leaves nothing behind."""
