"""`./run sharing`: two clients with half a card each, and several programs of one lease: what each sees, gets, and does to the others."""

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
        four = self.start(["lease_programs.py"], lease=("--memory", "50%"))
        codes = [four.expect("codes").split()[1:] for _ in range(2)]
        four.end()
        self.check("four programs of a lease, 40 % each: two get it", codes[0] == ["0", "0", "2", "2"])
        self.check("when one ends, another gets it", codes[1] == ["0"])
        self.wait_for_no_lease()

    def run(self):
        """Everything; whether it was as it has to be."""
        print("Two clients with half a GPU each", flush=True)
        self.halves()
        print("Programs of one lease", flush=True)
        self.programs_of_one()
        if not self.args.no_torch:
            print("GPT-2 training by two programs at the same time", flush=True)
            native, leased = self.train(2, "native"), self.train(2, "halves", ("--memory", "50%"))
            if (len(native), len(leased)) == (2, 2):
                ratio = sum(1 / step for step in leased) / sum(1 / step for step in native)
                self.note("step, native / with half a GPU each", f"{native} / {leased}", f"ms; throughput {ratio:.3f}")
            else:
                self.check("GPT-2 training", False)
        return {"figures": self.rows, "failed": self.bad}
