"""`./run sharing`: two clients with half a card each, and several programs of one lease: what each sees, gets, and does to the others. The same
of two clients with a card each (`--only apart`), where there are two."""

import json

import mps


class Sharing(mps.Mps):
    """All parts."""

    def halves(self):
        """Two clients: each sees its half, and nothing of the other one's running out."""
        first, _, mib = self.program("--memory", "50%")
        limits = {row["devices"][0]["limit_bytes"] >> 20 for row in self.leases()}
        second, _, seen = self.program("--memory", "50%", other=True)
        self.note("memory seen by each", f"{mib} / {seen}", "MiB")
        self.check("each sees its lease's memory", {mib, seen} == limits)
        cards = {row["memory_bytes"] // 2 >> 20 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]}
        self.check("which is half of the card's", limits <= cards)
        self.check("most of it can be had", self.ask(first, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("more than the lease has cannot: out of memory", self.ask(first, f"alloc {mib // 2}", "alloc") == ["2"])
        self.check("which is no fault", self.ask(first, "check", "state") == ["0"])
        self.check("the other one has all of its own", self.ask(second, f"alloc {seen * 3 // 4}", "alloc") == ["0"])
        self.check("and works", float(self.rates([second], 1, 0.1)[0]) > 0)
        first.end()
        second.end()
        self.wait_for_no_lease()

    def programs_of_one(self):
        """Four programs of one lease have its memory together."""
        four = self.start(["lease_programs.py", "memory"], lease=("--memory", "50%"))
        codes = [four.expect("codes").split()[1:]]
        both = self.leases()[0]["devices"][0]["limit_bytes"] * 4 // 5
        used = lambda: max(row["used_bytes"] or 0 for row in json.loads(self.server.tool("gpus", "--json"))["gpus"])
        self.check("the server sees what they have", self.until(lambda: used() >= both))
        four.say("go")
        codes += [four.expect("codes").split()[1:] for _ in range(2)]
        four.end()
        self.check("four programs of a lease, 40 % each: two get it", codes[0] == ["0", "0", "2", "2"])
        self.check("what one gives back, another gets at once", codes[1] == ["0"])
        self.check("when one ends, another gets it", codes[2] == ["0"])
        self.wait_for_no_lease()

    def contexts(self):
        """Programs of one lease begin as long as their contexts fit into its memory."""
        each = max(row["context_bytes"] for row in json.loads(self.server.tool("gpus", "--json"))["gpus"])
        self.note("memory of a context", each >> 20, "MiB")
        programs = self.start(["lease_programs.py", "contexts"], lease=("--memory", f"{each * 13 // 5}"))
        self.check("a lease with the memory of 2.6 contexts: two programs begin", programs.expect("begun").split()[1] == "2")
        seconds, *said = programs.expect("refused").split()[1:]
        self.note("the third one waits", seconds, "s")
        self.check("not much longer than 5 s", float(seconds) < 7)
        self.check("and hears out of memory", said == ["cuInit:", "error", "2"])
        self.check("when one ends, another begins", programs.expect("then").split()[1] == "ready")
        programs.end()
        self.wait_for_no_lease()

    def hungry(self):
        """A third program, which asks for more than it may have."""
        third, _, mib = self.program("--memory", "15%", other=True)
        self.check("beside them one asks for more than its lease has: out of memory", self.ask(third, f"alloc {mib + 64}", "alloc") == ["2"])
        third.end()

    def cards(self):
        """The UUIDs of the server's cards, as programs are told them."""
        return {row["uuid"].partition("-")[2].replace("-", "").lower() for row in json.loads(self.server.tool("gpus", "--json"))["gpus"]}

    def apart(self):
        """Two clients with a card each, at the same time: each sees its own, and nothing of what the other one does to its."""
        first, _, mib = self.program()
        second, _, _ = self.program(other=True)
        seen = [self.ask(program, "devices", "devices") for program in (first, second)]
        self.check("each sees one device", [len(uuids) for uuids in seen] == [1, 1])
        self.check("not the same one", seen[0] != seen[1])
        self.check("both are the server's", {uuid for uuids in seen for uuid in uuids} <= self.cards())
        addresses = [self.ask(program, f"put {number}", "put") for number, program in ((7, first), (8, second))]
        self.note("addresses that they write to", addresses, "")
        self.check("each reads what it has written", [self.ask(p, "get", "got") for p in (first, second)] == [["7"], ["8"]])
        self.check("one takes most of its card", self.ask(first, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("so does the other one, of its own", self.ask(second, f"alloc {mib * 3 // 4}", "alloc") == ["0"])
        self.check("one faults", self.ask(first, "fault", "fault") != ["0"])
        self.check("and stays broken", self.ask(first, "check", "state") != ["0"])
        self.check("the other one does not notice", self.ask(second, "check", "state") == ["0"])
        self.check("has its memory", self.ask(second, "get", "got") == ["8"])
        self.check("and works", float(self.rates([second], 1, 0.1)[0]) > 0)
        self.finish(first)
        second.end()
        self.wait_for_no_lease()

    def run(self):
        """Everything; whether it was as it has to be."""
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
            self.check("which neither of them notices", len(beside) == 2 and max(beside) < 1.5 * max(leased))
        return {"figures": self.rows, "failed": self.bad}
