"""`./run sharing`: two clients with half a card each, and several programs of one lease.

Checks what each sees and gets, and how they affect each other; with two cards also two clients with
a card each (`--only apart`)."""

import json

import mps


class Sharing(mps.Mps):
    """All parts."""

    def halves(self):
        """Checks two clients: each sees its half, unaffected when the other runs out of memory."""
        first, _, mib = self.program("--memory", "50%")
        limits = {row["devices"][0]["limit_bytes"] >> 20 for row in self.leases()}
        second, _, seen = self.program("--memory", "50%", other=True)
        self.note("memory seen by each", f"{mib} / {seen}", "MiB")
        self.check("each sees its lease's memory", {mib, seen} == limits)
        cards = {row["memory_bytes"] // 2 >> 20 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]}
        self.check("the lease's memory is half of the card's", limits <= cards)
        self.check("most of it can be allocated", self.ask(first, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("more than the lease's memory cannot: out of memory", self.ask(first, f"alloc {mib // 2}", "alloc") == ["2"])
        self.check("out of memory is no fault", self.ask(first, "check", "state") == ["0"])
        self.check("the other client can allocate all of its own", self.ask(second, f"alloc {seen * 3 // 4}", "alloc") == ["0"])
        self.check("and works", float(self.rates([second], 1, 0.1)[0]) > 0)
        first.end()
        second.end()
        self.wait_for_no_lease()

    def programs_of_one(self):
        """Checks that four programs of one lease share its memory."""
        four = self.start(["lease_programs.py", "memory"], lease=("--memory", "50%"))
        codes = [four.expect("codes").split()[1:]]
        both = self.leases()[0]["devices"][0]["limit_bytes"] * 4 // 5
        used = lambda: max(row["used_bytes"] or 0 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"])
        self.check("the server sees their memory", self.until(lambda: used() >= both))
        four.say("go")
        codes += [four.expect("codes").split()[1:] for _ in range(2)]
        four.end()
        self.check("four programs of a lease, 40 % each: two get it", codes[0] == ["0", "0", "2", "2"])
        self.check("memory that one frees, another gets at once", codes[1] == ["0"])
        self.check("when one exits, another gets its memory", codes[2] == ["0"])
        self.wait_for_no_lease()

    def contexts(self):
        """Checks that programs of one lease start while their contexts fit into its memory."""
        each = max(row["context_bytes"] for row in json.loads(self.server.tool("gpus", "--json"))["gpus"])
        self.note("memory of a context", each >> 20, "MiB")
        programs = self.start(["lease_programs.py", "contexts"], lease=("--memory", f"{each * 13 // 5}"))
        self.check("a lease with the memory of 2.6 contexts: two programs start", programs.expect("begun").split()[1] == "2")
        seconds, *said = programs.expect("refused").split()[1:]
        self.note("the third one waits", seconds, "s")
        self.check("it waits not much longer than 5 s", float(seconds) < 7)
        self.check("it gets out of memory", said == ["cuInit:", "error", "2"])
        self.check("when one exits, another starts", programs.expect("then").split()[1] == "ready")
        programs.end()
        self.wait_for_no_lease()

    def hungry(self):
        """Runs a third program, which asks for more than its limit."""
        third, _, mib = self.program("--memory", "15%", other=True)
        self.check("a third client asks for more than its lease has: out of memory", self.ask(third, f"alloc {mib + 64}", "alloc") == ["2"])
        third.end()

    def cards(self):
        """Returns the UUIDs of the server's cards, as programs see them."""
        return {row["uuid"].partition("-")[2].replace("-", "").lower() for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]}

    def apart(self):
        """Checks two clients with a card each: each sees its own, unaffected by the other."""
        first, _, mib = self.program()
        second, _, _ = self.program(other=True)
        seen = [self.ask(program, "devices", "devices") for program in (first, second)]
        self.check("each sees one device", [len(uuids) for uuids in seen] == [1, 1])
        self.check("they are different devices", seen[0] != seen[1])
        self.check("both belong to the server", {uuid for uuids in seen for uuid in uuids} <= self.cards())
        addresses = [self.ask(program, f"put {number}", "put") for number, program in ((7, first), (8, second))]
        self.note("addresses that they write to", addresses, "")
        self.check("each reads its own number", [self.ask(p, "get", "got") for p in (first, second)] == [["7"], ["8"]])
        self.check("one allocates most of its card", self.ask(first, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("the other allocates most of its own", self.ask(second, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("one faults", self.ask(first, "fault", "fault") != ["0"])
        self.check("its context stays broken", self.ask(first, "check", "state") != ["0"])
        self.check("the other client is unaffected", self.ask(second, "check", "state") == ["0"])
        self.check("it has its memory", self.ask(second, "get", "got") == ["8"])
        self.check("and works", float(self.rates([second], 1, 0.1)[0]) > 0)
        self.finish(first)
        second.end()
        self.wait_for_no_lease()

    def run(self):
        """Runs all parts; returns True if all checks passed."""
        several = len(self.cards()) > 1
        if "apart" in self.args.only and not several:
            raise RuntimeError("two clients with a GPU each need two GPUs")
        if several:
            print("Two clients with a GPU each", flush=True)
            self.apart()
        if "apart" in self.args.only:
            return {"figures": self.rows, "failed": self.bad}
        if "contexts" not in self.args.only:
            print("Two clients with half a GPU each", flush=True)
            self.halves()
            print("Programs of one lease", flush=True)
            self.programs_of_one()
        print("Contexts of programs of one lease", flush=True)
        self.contexts()
        if "contexts" in self.args.only:
            return {"figures": self.rows, "failed": self.bad}
        if not self.args.no_torch:
            print("GPT-2 training by two clients at the same time", flush=True)
            native = self.train(2, "native")
            leased = self.train(2, "halves", ("--memory", "50%"), two_clients=True)
            if (len(native), len(leased)) == (2, 2):
                ratio = sum(1 / step for step in leased) / sum(1 / step for step in native)
                self.note("step, native / with half a GPU each", f"{native} / {leased}", f"ms; throughput {ratio:.3f}")
            else:
                self.check("GPT-2 training", False)
            beside = self.train(2, "beside", ("--memory", "40%"), two_clients=True, meanwhile=self.hungry)
            self.check("neither of them is affected", len(beside) == 2 and max(beside) < 1.5 * max(leased))
        return {"figures": self.rows, "failed": self.bad}
