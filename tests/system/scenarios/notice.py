"""Notices of granted and lost leases: at prompts (once), in systemctl status, in the journal."""
import json

from harness import expect
from scenarios.policy import lease

ORDER = 47
GROUP = "restarts"
LOST = "83f6a800a3ea487e81baca4df66f999a"
OVER = "b33b7a197cde42a497afb486369f74ce"
# A lease ends when its programs do no GPU work for a moment.
IDLE = """
warn_after = "1s"
release_after = "4s"
"""
TWO = """
[[lease]]
name = "one"
memory = "60%"

[[lease]]
name = "two"
memory = "60%"
"""
# alice in each shell on a terminal, pressing Enter now and then; /run/shells/NAME holds each
# shell's output.
SHELLS = r"""
import os, pty, select, sys, time
shells = {"bash": "bash", "zsh": "zsh -l", "fish": "fish", "tcsh": "tcsh -l", "off": "GPUSESSION_DISABLE=1 bash -l"}
os.makedirs("/run/shells", exist_ok=True)
open_, out = {}, {}
for name, shell in shells.items():
    pid, fd = pty.fork()
    if not pid:
        os.execvp("ssh", ["ssh", "-tt", "alice@client"] + ([] if name == "bash" else [shell]))
    open_[fd], out[name] = name, open("/run/shells/" + name, "wb", buffering=0)
while True:
    for fd in select.select(list(open_), [], [], 0.3)[0]:
        try: out[open_[fd]].write(os.read(fd, 65536))
        except OSError: del open_[fd]
    for fd in open_: os.write(fd, b"\r")
    time.sleep(0.1)
"""
# One shell of alice's on a terminal, with a prompt of its own, for some prompts. Counts the notices
# of a loss, and the processes that the shell creates; the threads of fish do not count.
FORKS = r"""
import os, pty, re, select, sys, time
shell = {"fish": "fish -C 'function fish_prompt; end; function fish_title; end'", "tcsh": "tcsh -l"}[sys.argv[1]]
disable = "GPUSESSION_DISABLE=1 " if "off" in sys.argv else ""
pid, fd = pty.fork()
if not pid:
    trace = "strace -f -qq -e trace=fork,vfork,clone,clone3 -o /tmp/forks.trace"
    os.execvp("ssh", ["ssh", "-q", "-tt", "alice@client", f"rm -f /tmp/forks.trace; {disable}TERM=dumb {trace} {shell}"])
text, said, end = b"", 0, time.monotonic() + 40
os.write(fd, b"echo do''ne\r")
while time.monotonic() < end and select.select([fd], [], [], end - time.monotonic())[0]:
    try: data = os.read(fd, 65536)
    except OSError: break
    text += data
    # The first answer comes after the first prompt.
    if text.count(b"done") > said:
        said = text.count(b"done")
        os.write(fd, b"echo do''ne\r" if said < 4 else b"exit\r")
else:
    os.kill(pid, 9)
    sys.exit(f"it does not end: {text[-2000:]!r}")
os.waitpid(pid, 0)
made = [l for l in open("/tmp/forks.trace") if re.search(r" (v?fork|clone3?)\(", l) and "CLONE_THREAD" not in l]
assert said >= 4, text
print(text.count(b"is lost"), len(made))
"""


def run(site, check):
    client, server = site.client, site.servers[0]
    gpus = [g["uuid"] for g in json.loads(server.ok("gpuserver gpus --json"))["gpus"]]
    status = "systemctl show -P StatusText gpusession"
    text = client.ok("cat /etc/gpusession/conf.d/lease.toml")

    with check("systemctl status counts the GPUs as they are granted"):
        server.ok(f"gpuserver off {gpus[1]}")
        client.write("/etc/gpusession/conf.d/lease.toml", TWO)
        client.ok("systemctl reload gpusession")
        client.until(f"{status} | grep '^1/2 GPUs leased (gpu1); waiting: '", 30)
        expect(client.ok("systemctl status gpusession --no-pager"), "1/2 GPUs leased")
        server.ok(f"gpuserver on {gpus[1]}")
        client.until(f"{status} | grep '^2/2 GPUs leased (gpu1)$'", 40)
    client.write("/etc/gpusession/conf.d/lease.toml", text)
    client.ok("systemctl reload gpusession")
    client.until("gpusession status | grep -q 'everyone .*\\bready'", 40)

    # On Debian, zsh does not read /etc/profile.
    client.ok("grep -q gpusession /etc/zsh/zprofile || echo 'source /etc/profile.d/gpusession.sh' >>/etc/zsh/zprofile; "
              "su -l alice -c 'touch ~/.zshrc'; rm -rf /run/shells")
    client.write("/root/shells.py", SHELLS)
    client.start("shells", "python3 /root/shells.py")
    client.until("test $(find /run/shells -type f -size +0 | wc -l) -ge 5", 20)
    before = lease(client, "everyone")
    client.start("holder", "killVictim 64", user="alice")
    client.until("grep -q READY /run/holder.out", 20)
    with check("a lease that ends on the server is lost: the journals of both ends name the lease and the reason, and journalctl -x explains it"):
        server.write("/etc/gpusession/gpuserver.d/idle.toml", IDLE)
        # Keeps the lease from coming back at once.
        server.ok(f"gpuserver off {gpus[0]} && gpuserver off {gpus[1]} && systemctl reload gpuserver")
        client.until(f"journalctl -b MESSAGE_ID={LOST} GPUSESSION_LEASE={before} -o cat --no-pager | grep .", 30)
        seen = client.ok(f"journalctl -b -x MESSAGE_ID={LOST} GPUSESSION_LEASE={before} -t gpusessiond --no-pager")
        expect(seen, f"lease {before}: lost: ")
        expect(seen, "Subject: A lease of GPUs was lost")
        expect(seen, f"The lease {before} was lost, not released: ")
        seen = server.until(f"journalctl -b MESSAGE_ID={OVER} GPUSESSION_LEASE={before} -t gpuserver -o json --no-pager | grep .", 10)
        assert json.loads(seen.splitlines()[-1])["GPUSESSION_CLIENT"] == "client", seen
    with check("status and D-Bus report that the lease is requested again"):
        client.until(f"{status} | grep '^0/2 GPUs leased; waiting: '", 20)
        expect(client.ok("gpusession status"), "0 of 2 GPU(s) leased")
    for shell in ("bash", "zsh", "fish", "tcsh"):
        with check(f"a prompt shows it once: {shell}"):
            client.until(f"grep -a 'is lost' /run/shells/{shell}", 10)
    with check("sh, which has no hook for prompts, shows it when it starts"):
        seen = client.ok("ssh -tt alice@client 'exec dash -l -i'", stdin="exit\n")
        assert seen.count("is lost") == 1, seen
    with check("once the GPUs are back, each prompt shows once why a program ended"):
        server.ok("rm /etc/gpusession/gpuserver.d/idle.toml && systemctl reload gpuserver")
        server.ok(f"gpuserver on {gpus[0]} && gpuserver on {gpus[1]}")
        client.until("gpusession status | grep -q 'everyone .*\\bready'", 40)
        client.until("grep 'was lost: .*; programs that are started now have another one' /run/gpusession/notice/1000", 10)
        for shell in ("bash", "zsh", "fish", "tcsh"):
            client.until(f"grep -a 'was lost' /run/shells/{shell}", 10)
        client.ok("systemctl stop shells holder; true")
        for shell, times in {"bash": 1, "zsh": 1, "fish": 1, "tcsh": 1, "off": 0}.items():
            seen = client.ok(f"cat /run/shells/{shell}")
            for text in ("is lost", "was lost"):
                assert seen.count(text) == times, f"{shell}: {text} {seen.count(text)} times\n{seen[-3000:]}"
            assert "rror" not in seen and "not found" not in seen, seen
    # A restarted daemon does not mention the loss again.
    client.ok("systemctl restart gpusession")
    client.until("gpusession status | grep -q 'is ready' && test ! -e /run/gpusession/notice/1000", 20)
    client.write("/root/forks.py", FORKS)

    def forks(shell, off=""):
        """Returns how often a notice is shown, and how many processes the shell creates."""
        return tuple(int(word) for word in client.ok(f"python3 /root/forks.py {shell} {off}", timeout=90).split())

    for shell in ("fish", "tcsh"):
        # Lets the shell create its own files on its first run in a home folder.
        forks(shell)
        own = forks(shell, "off")[1]
        with check(f"without a notice our scripts start no process: {shell}"):
            seen = forks(shell)
            assert seen == (0, own), f"{seen}; without our scripts (0, {own})"
        with check(f"a notice is shown once, without a further process: {shell}"):
            line = "gpusession: GPU lease nobodys is lost: for this test"
            client.write("/run/gpusession/notice/1000", f"{line}\n")
            client.ok(f"mkdir /run/gpusession/notice/1000.lines && touch '/run/gpusession/notice/1000.lines/{line}'")
            try:
                seen = forks(shell)
                assert seen == (1, own), f"{seen}; without our scripts (0, {own})"
                seen = forks(shell, "off")
                assert seen == (0, own), f"{seen} with GPUSESSION_DISABLE=1; without a notice (0, {own})"
            finally:
                client.ok("rm -rf /run/gpusession/notice/1000 /run/gpusession/notice/1000.lines")
    with check("the next program of these shells has GPUs"):
        assert lease(client, "everyone") != before
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
