"""Compares the results of a native and a remote process."""

import re

EXPECTED_STATUS = {"devAssert": 3, "torch-ranks-killed": 1}
# Programs that print properties of the card.
OF_THE_CARD = {"deviceQuery", "cooperative", "machineCode", "multiDevice"}
# Programs of calls that the simulated driver answers by half (`--stand-in`).
ANSWERED_BY_HALF = {"managedPlaces"}


def difference(native, remote, names=("native", "remote")):
    """Returns the first line that differs."""
    for number, pair in enumerate(zip([*native, "(end)"], [*remote, "(end)"], strict=False), 1):
        if pair[0] != pair[1]:
            return f"line {number}: {names[0]} '{pair[0][:90]}', {names[1]} '{pair[1][:90]}'"
    return "number of lines"


LOSS = re.compile(r"step (\d+) loss (\S+)")


def compare_losses(native, remote, tolerance=1e-3):
    """Returns the first step with a loss outside the tolerance, and the largest difference."""
    worst = 0.0
    steps = [LOSS.search(line) for line in native]
    others = [LOSS.search(line) for line in remote]
    if len(steps) != len(others) or not steps:
        return f"{len(steps)} steps native, {len(others)} remote", worst
    for one, other in zip(steps, others, strict=True):
        if not one or not other:
            return "unexpected output", worst
        a, b = float.fromhex(one.group(2)), float.fromhex(other.group(2))
        relative = abs(a - b) / max(abs(a), 1e-12)
        worst = max(worst, relative)
        if not relative <= tolerance:
            return f"step {one.group(1)}: loss {a:.6f} native, {b:.6f} remote", worst
    return "", worst


def assertions(result):
    """Returns the messages of failed assertions on standard error, sorted."""
    return sorted(line for line in result.err.splitlines() if "Assertion" in line)


def stand_in(name, folder):
    """Returns a card's output in place of a native one, or None if the program runs natively."""
    recorded = folder and folder / f"{name}.out"
    return recorded.read_text() if name.partition("@")[0] in ANSWERED_BY_HALF and recorded and recorded.exists() else None


def as_recorded(name, native, folder):
    """Returns how a native output differs from the one recorded in `folder`, if there is one."""
    recorded = folder / f"{name}.out"
    if name.partition("@")[0] in OF_THE_CARD or not recorded.exists():
        return ""
    lines = recorded.read_text().splitlines()
    return "" if lines == native.lines() else difference(lines, native.lines(), ("recorded", "native"))


def judge(kind, native, remote, expected=0):
    """Returns verdict and explanation of a comparison."""
    if failure := native.failure(expected):
        return "native failed", failure
    if failure := remote.failure(expected):
        return "FAILED", failure
    if kind == "losses":
        problem, worst = compare_losses(native.lines(), remote.lines())
        return ("DIFFERS", problem) if problem else ("ok", f"largest relative difference {worst:.1e}")
    if native.lines() != remote.lines():
        return "DIFFERS", difference(native.lines(), remote.lines())
    if assertions(native) != assertions(remote):
        return "DIFFERS", "standard error: " + difference(assertions(native), assertions(remote))
    return "ok", ""
