"""`./run shares`: processes of one lease that share memory, under all that ends or moves it."""

import itertools
import json
import os
import random
import signal
import time

import parking

# Pairs of processes whose ends are drawn at random.
ENDS, FEW_ENDS = 500, 40
# Seconds until memory is free after its last process.
FREE = 2


class Shares(parking.Parking):
    """All parts."""

    def pair(self, mib, *lease):
        """Starts two processes with one's memory open in the other; returns both and the lease."""
        both = self.start(["shares_program.py"], lease=lease)
        for line, word in [("start a", "started"), ("start b", "started"), (f"a alloc {mib}", "alloc 0"), ("pass a b", "open 0")]:
            self.must(both, line, word)
        return both, self.only_lease()

    def ask(self, both, line):
        """Sends a line, and returns the answer."""
        both.say(line)
        return both.line()

    def must(self, both, line, answer):
        """Sends a line that has one right answer."""
        said = self.ask(both, line)
        if said != answer:
            raise RuntimeError(f"{line!r}: expected {answer!r}, got {said!r}")

    def intact(self, both):
        """Returns True if both processes read what the first one wrote."""
        return [self.ask(both, f"{name} check") for name in "ab"] == ["intact", "intact"]

    def sharing(self, lease):
        """Returns how many processes of a lease share memory, as `gpuserver ps` shows it."""
        rows = json.loads(self.server.tool("ps", "--json"))["workers"]
        return sum(row["shares_memory"] for row in rows if row["lease"] == lease)

    def stocked(self, lease):
        """Returns True if no worker of a lease is about to be ready for a program."""
        rows = [row for row in json.loads(self.server.tool("ps", "--json"))["workers"] if row["lease"] == lease]
        return len(rows) > 1 and all(row["state"] != "starting" for row in rows)

    def refused(self, lease):
        """Returns True if the server does not park a lease because of what it shares."""
        try:
            self.park(lease)
        except RuntimeError as error:
            return "share" in str(error) and self.state(lease)[0] == "active"
        return False

    def parked(self):
        """Parks processes with imports, those without, and one whose memory is asked for."""
        both, lease = self.pair(64)
        self.check("`ps` shows both", self.sharing(lease) == 2)
        self.check("they are not parked", self.refused(lease) and self.intact(both))
        self.must(both, "b close", "close 0")
        self.check("after the last close nothing is shared", self.until(lambda: self.sharing(lease) == 0))
        self.park(lease)
        self.check("then they are parked", self.state(lease) == ("parked", 0))
        self.must(both, "pass a b", "open 0")
        self.check("an import brings them back", self.state(lease)[0] == "active" and self.intact(both))
        self.check("and they share again", self.sharing(lease) == 2 and self.refused(lease))
        both.end()
        self.wait_for_no_lease()

    def limits(self):
        """Counts shared memory once, for the process that has created it or for its heir."""
        # On a card, each process has a context of half a GiB.
        limit = 8192 if self.card else 1024
        part = limit * 5 // 8
        both, _ = self.pair(part, "--memory", f"{limit}MiB")
        read = lambda: max(row["used_bytes"] or 0 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"])
        self.check("the server sees their memory", self.until(lambda: read() >= part << 20))
        self.note("memory on the card / limit of the lease", f"{self.used()} / {limit}", "MiB")
        self.check("it counts once", self.ask(both, f"b alloc {part // 8}") == "alloc 0" and self.intact(both))
        self.check("the rest of the lease is bounded", self.ask(both, f"b alloc {part}") == "alloc 2")
        self.must(both, "kill a", "killed")
        # No command shows when the heir counts the memory: two messages after the end.
        time.sleep(3)
        self.check("memory outlives the process that has created it", self.ask(both, "b check") == "intact")
        self.check("its heir counts it", self.ask(both, f"b alloc {part}") == "alloc 2")
        self.must(both, "b close", "close 0")
        self.check("after the last close it is free", self.until(lambda: self.ask(both, f"b alloc {part}") == "alloc 0", FREE))
        both.end()
        self.wait_for_no_lease()

    def frees(self, name, before, end):
        """Ends processes in one way, and checks that the card has their memory back."""
        begun = time.monotonic()
        end()
        free = self.until(lambda: self.used() <= before, FREE + 8)
        took = time.monotonic() - begun
        self.note(f"{name}: memory free after", round(took, 2), "s")
        self.check(f"{name}: within {FREE} s", free and took <= FREE)

    def ends(self):
        """Ends sharing processes by each cause."""
        before = self.settled()
        mib = 1024 if self.card else 64
        for last in ("exporter", "importer"):
            both, _ = self.pair(mib)
            first, other = ("b", "a") if last == "exporter" else ("a", "b")
            self.must(both, f"kill {first}", "killed")
            self.check(f"the {last} keeps the memory", self.ask(both, f"{other} check") == "intact")
            self.frees(f"kill -9, the {last} last", before, lambda: (self.must(both, f"kill {other}", "killed"), both.end()))
            self.wait_for_no_lease()
        both, lease = self.pair(mib)
        self.frees("gpuserver kill LEASE", before, lambda: self.server.tool("kill", lease))
        self.check("both processes learn it", "intact" not in [self.ask(both, f"{name} check") for name in "ab"])
        both.end()
        self.wait_for_no_lease()
        both, lease = self.pair(mib)
        self.server.tool("drain")
        self.check("a drain leaves them and what they share", self.intact(both) and self.ask(both, "b close") == "close 0")
        self.must(both, "pass a b", "open 0")
        self.server.tool("drain", "--end")
        both.end()
        self.wait_for_no_lease()

    def replaced(self):
        """Replaces the server: it knows the imports that it finds."""
        with self.replaceable() as store:
            for how in (signal.SIGUSR2, signal.SIGKILL):
                both, lease = self.pair(64)
                self.replace(store, how)
                known = self.until(lambda lease=lease: self.sharing(lease) == 2)
                self.check(f"{how.name}: the next server knows what they share", known and self.refused(lease))
                self.must(both, "b close", "close 0")
                self.must(both, "pass a b", "open 0")
                self.check(f"{how.name}: they share again", self.intact(both))
                self.must(both, "kill a", "killed")
                self.check(f"{how.name}: the importer keeps the memory", self.ask(both, "b check") == "intact")
                both.end()
                self.wait_for_no_lease()

    def descriptors(self):
        """Returns the number of the server's descriptors."""
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))

    def random_ends(self):
        """Starts and kills processes that share memory, at random moments."""
        lot, count = random.Random(self.args.fault_seed), FEW_ENDS if self.args.quick else ENDS
        holder = self.start(["shares_program.py"])
        # Names differ, so that those of several pairs run at a time.
        names = (f"p{number}" for number in itertools.count())
        self.must(holder, "start first", "started")
        lease = self.only_lease()
        self.check("its stock is complete", self.until(lambda: self.stocked(lease)))
        files = sorted(os.listdir("/dev/shm"))
        before, open_files = self.settled(), self.descriptors()
        wrong = []
        for number in range(count):
            a, b = next(names), next(names)
            steps = [f"start {a}", f"start {b}", f"{a} alloc 8", f"pass {a} {b}", f"{b} check", f"{a} free", f"{b} check"]
            for step in steps[: lot.randrange(2, len(steps) + 1)]:
                said = self.ask(holder, step)
                if step.split()[-1] == "check" and said != "intact" or said.split()[-1] not in ("started", "0", "intact"):
                    wrong.append(f"{number}: {step}: {said}")
            for name in lot.sample((a, b), 2):
                self.must(holder, f"kill {name}", "killed")
        self.note(f"pairs of processes, killed at random (--fault-seed {self.args.fault_seed})", count, "")
        self.check(f"each answer is right {wrong[:3] or ''}", not wrong)
        self.check("nothing is shared", self.until(lambda: self.sharing(lease) == 0))
        self.check("the card has its memory", self.until(lambda: self.used() <= before))
        self.check("the server has no more descriptors", self.until(lambda: self.descriptors() <= open_files))
        self.check("no file is left", sorted(os.listdir("/dev/shm")) == files)
        self.check("the lease works", self.ask(holder, "first alloc 8") == "alloc 0")
        holder.end()
        self.wait_for_no_lease()

    def parts(self):
        """Returns title and function of each part, by the name for `--only`."""
        return {
            "parking": ("Parking", self.parked),
            "limits": ("Limits", self.limits),
            "ends": ("Ends", self.ends),
            "restarts": ("The server is replaced", self.replaced),
            "random": ("Random ends", self.random_ends),
        }
