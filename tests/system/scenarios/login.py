"""All ways to start a program: each gets the machine's GPUs without any command."""
from harness import Failed, expect

ORDER = 20
GROUP = "users"
PROBE = "/usr/local/bin/probe"
RIGHT = "sums right"
# Prints what a program sees of its login session and of [environment], and whether it has a GPU.
PROBE_TEXT = """#!/bin/sh
echo "session=${GPUSESSION_ID:-none} setting=${NCCL_DEBUG:-none} models=${HF_HOME:-none} user=$(id -un)"
exec /usr/local/bin/vectorAdd
"""
PASSWORD = "echo secret | ssh alice@client"

# The table of docs/user-guide.md: how a program is started, the user it runs as, and the variables
# it sees. `both` stands for GPUSESSION_ID and the variables of [environment], `setting` for the
# latter only, `none` for neither.
ROWS = [
    ("ssh with a command", f"ssh alice@client {PROBE}", "alice", "both"),
    *((f"ssh with a terminal, in {shell}", f"ssh -tt alice@client {shell} -c {PROBE} </dev/null", "alice", "both")
      for shell in ("sh", "bash", "zsh", "csh", "tcsh", "fish")),
    *((f"a login shell, {shell} -l", f"ssh alice@client {shell} -l -c {PROBE}", "alice", "both")
      for shell in ("dash", "bash", "zsh", "fish")),
    ("su", f"su alice -c {PROBE}", "alice", "both"),
    ("su -l", f"su -l alice -c {PROBE}", "alice", "both"),
    ("su -l to another user, in a session", f"{PASSWORD} su -l bob -c {PROBE}", "bob", "both"),
    ("su to another user, in a session", f"{PASSWORD} su bob -c {PROBE}", "bob", "both"),
    ("sudo", f"{PASSWORD} sudo -S {PROBE}", "root", "none"),
    ("sudo -i", f"{PASSWORD} sudo -S -i {PROBE}", "root", "none"),
    ("sudo -u", f"sudo -u bob {PROBE}", "bob", "none"),
    ("sudo -i -u", f"sudo -i -u bob {PROBE}", "bob", "both"),
    ("a system unit", f"systemd-run --quiet --wait --pipe {PROBE}", "root", "none"),
    ("a system unit with User=", f"systemd-run --quiet --wait --pipe -p User=alice {PROBE}", "alice", "none"),
    ("systemd-run --user", f"ssh alice@client systemd-run --user --quiet --wait --pipe {PROBE}", "alice", "setting"),
    ("a user unit", "ssh alice@client 'systemctl --user daemon-reload; systemctl --user start gpu; cat /tmp/unit.out'", "alice", "setting"),
]

OFF = {
    "a shell": "ssh alice@client 'export GPUSESSION_DISABLE=1; vectorAdd'",
    "su": "su alice -c 'GPUSESSION_DISABLE=1 vectorAdd'",
    "su that keeps the environment": "GPUSESSION_DISABLE=1 su alice -c vectorAdd",
    "sudo": "GPUSESSION_DISABLE=1 sudo --preserve-env=GPUSESSION_DISABLE -u bob vectorAdd",
    "a system unit": "systemd-run --quiet --collect --wait --pipe -p User=alice -E GPUSESSION_DISABLE=1 vectorAdd",
    "systemd-run --user": "ssh alice@client systemd-run --user --quiet --wait --pipe -E GPUSESSION_DISABLE=1 vectorAdd",
}

CONSOLE = rf"""
set timeout 20
spawn login alice
expect "assword:" ; send "secret\r"
expect -re {{\$ $}} ; send "{PROBE}; exit\r"
expect {{
    "{RIGHT}" {{ expect eof; exit 0 }}
    timeout {{ exit 1 }}
    eof {{ exit 1 }}
}}
"""

UNIT = f"""[Service]
Type=oneshot
ExecStart={PROBE}
StandardOutput=truncate:/tmp/unit.out
"""


def session(seen):
    """Returns the GPUSESSION_ID of a probe; None if it had none."""
    for word in seen.split():
        if word.startswith("session="):
            return None if word == "session=none" else word.removeprefix("session=")
    raise Failed(f"no probe in {seen!r}")


def right(seen, user, given):
    expect(seen, RIGHT)
    expect(seen, f"user={user}")
    expect(seen, "setting=none" if given == "none" else "setting=WARN")
    expect(seen, "models=none" if given == "none" else "models=/srv/models")
    if (session(seen) is not None) != (given == "both"):
        raise Failed(f"GPUSESSION_ID is {session(seen)}:\n{seen}")


def box(client):
    """Creates root's and alice's folders for containers, and the device specification."""
    client.write("/root/box", BOX, "755")
    client.ok("mkdir -p /etc/cdi && gpusession cdi >/etc/cdi/gpusession.json && /root/box")
    client.ok("test -e /home/alice/box || { cp -r /srv/box /home/alice/box && chown -R alice: /home/alice/box; }")


def run(site, check):
    client = site.client
    client.write(PROBE, PROBE_TEXT, "755")
    client.write("/home/alice/.config/systemd/user/gpu.service", UNIT)
    client.ok("chown -R alice: /home/alice/.config")
    # Both jobs take a while to start, and are checked below.
    client.write("/etc/cron.d/gpu", f"* * * * * alice {PROBE} >/tmp/cron.out 2>&1\n"
                 "* * * * * bob /usr/local/bin/memFree >/tmp/bob.out 2>&1\n")
    # bob has a lease of his own, in addition to the machine's.
    client.write("/etc/gpusession/conf.d/bobs.toml", '[[lease]]\nname = "bobs"\nfor_user = "bob"\nmemory = "20%"\n')
    client.ok("systemctl reload gpusession")
    client.until("gpusession status | grep -q 'bobs .*\\bready'", 20)
    client.ok("rm -f /tmp/cron.out /tmp/bob.out /tmp/at.out /tmp/off.out; systemctl start cron atd")
    client.ok(f"su -l alice -c 'echo \"{PROBE} >/tmp/at.out 2>&1\" | at now 2>&1'")
    client.ok("su -l alice -c 'export GPUSESSION_DISABLE=1; echo \"vectorAdd >/tmp/off.out 2>&1\" | at now 2>&1'")

    for what, how, user, given in ROWS:
        with check(what):
            right(client.ok(how), user, given)
    with check("login on a console"):
        client.write("/root/console.exp", CONSOLE)
        right(client.ok("expect /root/console.exp"), "alice", "both")
    with check("su to oneself, in a session, stays in it"):
        seen = client.ok(f"{PASSWORD} '{PROBE}; su -l alice -c {PROBE}'")
        ids = {session(line) for line in seen.splitlines() if "session=" in line}
        if seen.count("session=") != 2 or len(ids) != 1:
            raise Failed(seen)
    with check("su to another user begins that user's session, and keeps other variables"):
        seen = client.ok(f"{PASSWORD} 'export NCCL_DEBUG=INFO; {PROBE}; su bob -c {PROBE}'")
        hers, his = (line for line in seen.splitlines() if "session=" in line)
        expect(his, "setting=INFO")
        if session(hers) == session(his):
            raise Failed(seen)
    for shell in ("sh", "bash", "zsh"):
        with check(f"a shell without variables, {shell}: eval \"$(gpusession env)\""):
            seen = client.ok(f"ssh alice@client 'env -i PATH=$PATH HOME=$HOME {shell}'",
                             stdin=f'{PROBE}\neval "$(gpusession env)"\n{PROBE}\n')
            before, after = (line for line in seen.splitlines() if "session=" in line)
            expect(before, "setting=none models=none")
            expect(after, "setting=WARN models=/srv/models")
            assert seen.count(RIGHT) == 2, seen
    for shell in ("csh", "tcsh"):
        with check(f"a login shell, {shell} -l: its profile files are correct"):
            seen = client.ok(f"ssh alice@client {shell} -l", stdin=f"{PROBE}\nexit 0\n")
            right("\n".join(line for line in seen.splitlines() if "tty" not in line), "alice", "both")
            assert not [word for word in ("rror", "ndefined", "ot found") if word in seen], seen
    with check("variables that a user has set stay"):
        expect(client.ok(f"ssh alice@client 'env NCCL_DEBUG=INFO {PROBE}'"), "setting=INFO")
        # Jobs of cron read that file, too.
        client.ok("systemctl stop cron; echo 'NCCL_DEBUG=TRACE' >>/etc/environment")
        try:
            expect(client.ok(f"ssh alice@client {PROBE}"), "setting=TRACE")
        finally:
            client.ok("sed -i /NCCL_DEBUG/d /etc/environment; rm -f /tmp/cron.out; systemctl start cron")
    with check("no LD_* variable is set"):
        seen = client.ok("ssh alice@client env")
        if "LD_" in seen:
            raise Failed(seen)
    for what, how in OFF.items():
        with check(f"GPUSESSION_DISABLE=1 turns it off without a message: {what}"):
            seen = client.fails(how)
            expect(seen, "cudaErrorNoDevice")
            if "gpusession" in seen:
                raise Failed(seen)
    with check("alice's dotfiles do not mention gpusession"):
        client.fails("grep -ril gpusession /home/alice --exclude-dir=.cache --exclude-dir=systemd --exclude-dir=containers")
    box(client)
    with check("podman, with the specification for containers"):
        expect(client.ok(f"{PODMAN} --device gpusession.org/gpu=all --rootfs /srv/box vectorAdd"), RIGHT)
        client.fails(f"{PODMAN} --rootfs /srv/box vectorAdd")
        off = f"{PODMAN} -e GPUSESSION_DISABLE=1 --device gpusession.org/gpu=all --rootfs /srv/box vectorAdd"
        expect(client.fails(off), "cudaErrorNoDevice")
    with check("podman without root"):
        expect(client.ok(f"ssh alice@client {PODMAN} --device gpusession.org/gpu=all --rootfs /home/alice/box vectorAdd"), RIGHT)
    with check("at, which keeps the variables of the shell that submits the job"):
        right(client.until(f"grep '{RIGHT}' /tmp/at.out && cat /tmp/at.out", 30), "alice", "both")
        client.until("grep cudaErrorNoDevice /tmp/off.out", 30, "GPUSESSION_DISABLE=1 is kept, too")
    with check("cron"):
        right(client.until(f"grep '{RIGHT}' /tmp/cron.out && cat /tmp/cron.out", 90), "alice", "none")
    with check("cron, of a user with a lease of his own"):
        # 20 % of 2048 MiB; on the machine's lease it would be half. While another program of his
        # runs, less is free; cron starts the job again a minute later.
        client.until("grep -qx 409 /tmp/bob.out", 150)
        client.ok("rm /etc/cron.d/gpu /etc/gpusession/conf.d/bobs.toml && systemctl reload gpusession")


# A root file system with a C library and a program, without gpusession.
BOX = """#!/bin/bash
set -eu
printf '[storage]\\ndriver="vfs"\\nrunroot="/run/containers/storage"\\ngraphroot="/var/lib/containers/storage"\\n' >/etc/containers/storage.conf
lib=/srv/box/usr/lib/x86_64-linux-gnu
mkdir -p $lib /srv/box/usr/lib64 /srv/box/usr/bin /srv/box/{etc,proc,sys,dev,tmp,run}
for l in lib lib64 bin; do ln -sfn usr/$l /srv/box/$l; done
cp -L /lib64/ld-linux-x86-64.so.2 /srv/box/usr/lib64/
cp -L /lib/x86_64-linux-gnu/{libc,libm}.so.6 /lib/x86_64-linux-gnu/{libgcc_s,libpthread,libdl,librt}.so.[0-9] /lib/x86_64-linux-gnu/libstdc++.so.6 $lib/
cp /usr/local/bin/vectorAdd /srv/box/usr/bin/
"""
# The lab's hosts can delegate no cgroups, and have no network for containers.
PODMAN = "podman --cgroup-manager cgroupfs run --rm --network host --cgroups disabled"
