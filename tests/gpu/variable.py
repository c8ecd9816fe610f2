"""Parts of a program's output that differ from run to run, and the rules that remove them.

A rule removes a number only beside a word or unit that shows its meaning: results have to compare.
"""

import dataclasses
import re

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
TIME_UNIT = r"(?:ns|us|µs|usecs?|ms|msecs?|s|secs?|(?:nano|micro|milli)?seconds?|minutes?|cycles|clocks)"
RATE_UNIT = (
    r"(?:[KMGT]i?B/s(?:ec)?|[KMGT]?[Bb]ytes/s(?:ec)?|[KMGT]?FLOP(?:S|s|/s)?|[KMGT]?[Ff]lop(?:s|/s)|[A-Za-z]*/s(?:ec(?:ond)?)?"
    r"|[A-Za-z]* per second|[fF][pP][sS])"
)
LABEL = (
    r"(?:time|times|elapsed|duration|latency|bandwidth|throughput|performance|speed-?up|clocks/block|per second"
    r"|options per sec\.?|runtime|overhead)"
)


@dataclasses.dataclass
class Rule:
    """A pattern whose group `n` varies, and texts that it has to change or to keep."""

    pattern: str
    word: str
    reason: str
    changes: tuple
    keeps: tuple


RULES = (
    Rule(
        rf"(?<![\w.])(?P<n>{NUMBER})[ ]*[\[(]?{TIME_UNIT}[\])]?(?![\w/])",
        "time",
        "a number with a unit of time",
        ("0.123 ms", "Processing time: 1.5e-03 (ms)", "took 12 seconds", "Time = 0.01 s,"),
        ("3 streams", "12 sums", "x0.5 m", "size 100", "8 msgs", "4 s/w"),
    ),
    Rule(
        rf"(?<![\w.])(?P<n>{NUMBER})[ ]*[\[(]?{RATE_UNIT}[\])]?(?!\w)",
        "rate",
        "a number with a unit of speed",
        ("12.3 GB/s", "4000.2 GFlop/s", "7 GFLOPS", "1.2 GElements/s", "100 MPixels/sec", "3e9 interactions per second"),
        ("12 GB", "5 flips", "1024 threads/block", "3 bytes"),
    ),
    Rule(
        rf"(?i)\b{LABEL}\b[^\d\n:=]{{0,60}}[:=][ ]*(?P<n>{NUMBER})",
        "measured",
        "a number after a colon or an equals sign whose name is that of a measurement",
        ("time spent executing by the GPU: 12.15", "Elapsed = 3", "Throughput (x) = 7.5", "Options per sec: 1.2E+9"),
        ("timesteps = 100", "sum = 5", "result: 3", "the time 4 results: 2"),
    ),
    Rule(
        r"\b(?P<n>0x0{0,4}[0-9a-fA-F]{10,12})\b",
        "address",
        "10 to 12 hexadecimal digits: addresses of a process; results of 32 and 64 bits have other lengths",
        ("0x7f12ab34cd00", "at 0x00007f12ab34cd00", "0x302000000a"),
        ("0xdeadbeef", "0x0123456789abcdef", "0xff"),
    ),
    Rule(
        r"(?i)\b(?:pid|process id)\b[ ]*[:=#]?[ ]*(?P<n>\d+)",
        "pid",
        "a number after pid",
        ("PID 123", "pid=77", "process id: 5"),
        ("rapid 3", "process 5"),
    ),
    Rule(
        r"\b(?P<n>\d\d:\d\d:\d\d(?:\.\d+)?)\b",
        "clock",
        "a time of day",
        ("12:34:56", "12:34:56.789"),
        ("1:2:3", "0000:01:00.0"),
    ),
    Rule(
        r"\b(?P<n>20\d\d-[01]\d-[0-3]\d)\b",
        "date",
        "a date",
        ("2026-11-24",),
        ("2026-99-24", "1-2-3"),
    ),
)


def apply(pattern, word, line):
    """Returns a line in which a word stands for the group `n`, or for the whole match."""

    def replace(match):
        whole, group = match[0], "n" if "n" in match.re.groupindex else 0
        begin, end = match.start(group) - match.start(), match.end(group) - match.start()
        return f"{whole[:begin]}<{word}>{whole[end:]}"

    return re.sub(pattern, replace, line)


def check_rules():
    """Raises an error if a rule changes or keeps one of its samples wrongly."""
    for rule in RULES:
        wrong = [text for text in rule.changes if f"<{rule.word}>" not in apply(rule.pattern, rule.word, text)]
        wrong += [text for text in rule.keeps if apply(rule.pattern, rule.word, text) != text]
        if wrong:
            raise RuntimeError(f"variable.py: the rule for {rule.reason} is wrong for: {'; '.join(wrong)}")


def without_variable(lines, own_rules, folder):
    """Returns lines without what varies; `own_rules` are a program's, reasons by pattern."""
    done = []
    for line in lines:
        changed = line.replace(str(folder), "<folder>")
        for rule in RULES:
            changed = apply(rule.pattern, rule.word, changed)
        for pattern in own_rules:
            changed = apply(pattern, "varies", changed)
        # The width of a column depends on the number in it.
        done.append(line if changed == line else re.sub(r"[ \t]+", " ", changed).strip())
    return done


# A remote number may be further from the native ones than these from each other, up to this factor.
SPREAD = 10


def same_shape(native, again, remote):
    """Compares a remote run with two native ones that differ from each other.

    Returns a description if the remote lines are like the native ones, and None if they are not.
    Numbers in lines that vary natively have to be near the native numbers; all else is equal.
    """
    if native == again:
        return "" if native == remote else None
    if sorted(native) == sorted(again) == sorted(remote):
        return "the order of its lines varies natively too"
    if not len(native) == len(again) == len(remote):
        return None
    example = None
    for lines in zip(native, again, remote):
        if lines[0] == lines[1]:
            if lines[2] != lines[0]:
                return None
            continue
        if len({re.sub(NUMBER, "#", line) for line in lines}) != 1:
            return None
        for a, b, c in zip(*(map(float, re.findall(NUMBER, line)) for line in lines)):
            if not abs(c - a) <= SPREAD * abs(b - a):
                return None
        example = example or lines[0]
    return f"numbers vary natively too: '{example[:90]}'"
