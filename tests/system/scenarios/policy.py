"""Access policy: users with access, leases within the policy, own leases, root's service."""
from harness import expect
from scenarios.login import PODMAN, box

ORDER = 30
GROUP = "users"
CREATE = ("busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager CreateLease a{{sv}}t "
          "3 Count u 1 MemoryFraction d 0.1 TTLUSec t 600000000 1")
POLICY = """
[access]
users = ["alice"]

[[lease]]
name = "of-root"
gpus = 1
memory = "10%"
for_user = "root"
"""


RULES = "/etc/polkit-1/rules.d/10-gpusession.rules"
RULE = """
polkit.addRule(function(action, subject) {
    if (action.id == "org.gpusession1.manage-pool" && subject.isInGroup("alice")) return polkit.Result.YES;
    if (action.id == "org.gpusession1.create-lease" && subject.user == "bob") return polkit.Result.NO;
});
"""
MANAGER = "busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager"
RELOAD, CAN_CREATE = f"{MANAGER} Reload", f"{MANAGER} CanCreateLease a{{sv}} 0"
# bob's ways to run a program.
BOB = {
    "ssh": "ssh bob@client {}",
    "ssh with a terminal": "ssh -q -tt bob@client {} </dev/null",
    "su -l": "su -l bob -c {}",
    "systemd-run --user": "ssh bob@client systemd-run --user --quiet --wait --pipe {}",
}
# A reload, with a polkit agent on this terminal. The argument is the bus flag that allows polkit to
# ask.
ASKED = f"""#!/bin/bash
rm -f /tmp/agent && mkfifo /tmp/agent
pkttyagent --process $$ --notify-fd 3 3>/tmp/agent &
# Returns when the agent is ready and closes the pipe.
read </tmp/agent
exec {RELOAD.replace("busctl", "busctl --allow-interactive-authorization=$1")}
"""
# alice, an administrator, types her password when asked.
ASKING = r"""
# The agent prints its prompt before it turns the echo off, and then discards earlier input.
set timeout 2
set asked 0
set waits 0
spawn ssh -q -tt alice@client /usr/local/bin/asked [lindex $argv 0]
expect {
    "assword:" { set asked 1; send "secret\r"; exp_continue }
    timeout {
        if {[incr waits] > 15} { exit 99 }
        if {$asked} { send "secret\r" }
        exp_continue
    }
    eof
}
exit [lindex [wait] 3]
"""


def run(site, check):
    client = site.client
    create = CREATE.format()
    with check("a reload applies the policy, and keeps the lease"):
        before = lease(client, "everyone")
        client.write("/etc/gpusession/conf.d/policy.toml", POLICY)
        client.ok("systemctl reload gpusession")
        client.until("gpusession list --json | grep -q of-root", 20)
        assert lease(client, "everyone") == before
    # Ends bob's systemd, which still has variables from the time with access.
    client.ok("loginctl terminate-user bob 2>/dev/null; systemctl stop user@1001.service")
    for what, how in BOB.items():
        with check(f"bob without access has no GPU, no variable and no message: {what}"):
            seen = client.fails(how.format("vectorAdd"))
            expect(seen, "cudaErrorNoDevice")
            assert "gpusession" not in seen.lower(), seen
            seen = client.ok(how.format("true"))
            assert seen == "", seen
            seen = client.ok(how.format("env"))
            expect(seen, "HOME=/home/bob")
            assert not any(word in seen for word in ("GPUSESSION", "NCCL_DEBUG", "HF_HOME")), seen
    with check("bob's shell on a terminal shows no message about GPUs"):
        seen = client.ok("ssh -q -tt bob@client", stdin="exit\n")
        expect(seen, "bob@client")
        assert "gpu" not in seen.lower(), seen
    with check("the journal names the refused user, and journalctl -x the remedy"):
        denied = "journalctl -b -t gpusessiond MESSAGE_ID=4195922267ea4a9eba8b2031c74f4446 GPUSESSION_USER=1001 --no-pager"
        client.until(f"{denied} -o cat | grep bob", 10)
        expect(client.ok(f"{denied} -x"), "[access] and [[lease]] in gpusession.toml determine which users get GPUs")
    with check("alice has"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("a set-uid program writes no trace file that alice names; a program of her own does"):
        client.ok("install -m 4755 $(command -v vectorAdd) /usr/local/bin/more-rights")
        trace = "GPUSESSION_TRACE=why,summary GPUSESSION_TRACE_FILE"
        expect(client.run(f"ssh alice@client {trace}=/home/alice/root-made-this more-rights 2>&1").out, "gpusession: ")
        client.fails("test -e /home/alice/root-made-this")
        client.ok(f"ssh alice@client {trace}=/home/alice/trace vectorAdd")
        expect(client.ok("cat /home/alice/trace"), "gpusession: ")
    with check("in a rootless container alice has GPUs, and her subordinate uids have none"):
        box(client)
        podman = f"ssh alice@client {PODMAN} --device gpusession.org/gpu=all"
        expect(client.ok(f"{podman} --rootfs /home/alice/box vectorAdd"), "sums right")
        expect(client.fails(f"{podman} --user 5 --rootfs /home/alice/box vectorAdd"), "cudaErrorNoDevice")
        expect(client.ok(f"{podman} --userns=keep-id --rootfs /home/alice/box vectorAdd"), "sums right")
    with check("alice cannot create a lease beyond policy"):
        seen = client.fails(f"su -l alice -c '{create}'")
        if not any(word in seen for word in ("Quota", "denied", "Denied", "not allowed", "no GPU beside", "extra_leases")):
            raise AssertionError(seen)
    with check("alice cannot release root's lease"):
        client.fails("su -l alice -c 'gpusession release " + lease(client, "of-root") + "'")
        client.ok("gpusession list --json | grep -q of-root")
    with check("alice cannot stop, restart or reload the service"):
        for verb in ("stop", "restart", "reload"):
            client.fails(f"su -l alice -c 'systemctl --no-ask-password {verb} gpusession'")
        client.ok("systemctl is-active gpusession")
    with check("polkit decides who manages the pool (by default administrators) and who creates leases (by default everyone)"):
        client.write("/etc/gpusession/conf.d/extra.toml", "[access]\nextra_leases = 1\n")
        client.ok("systemctl reload gpusession")
        client.until(f"su -l alice -c '{CAN_CREATE}' | grep -qv no", 20)
        expect(client.fails(f"su -l alice -c '{RELOAD}'"), "denied")
        client.ok(f"su -l bob -c '{CAN_CREATE}' | grep -E 'yes|busy'")
    with check("without the flag to ask, an administrator is denied at once; with it, polkit asks for the password and allows the call"):
        client.write("/usr/local/bin/asked", ASKED, "755")
        client.write("/root/asking.exp", ASKING)
        seen = client.fails("expect /root/asking.exp no")
        expect(seen, "denied")
        assert "assword:" not in seen, seen
        seen = client.ok("expect /root/asking.exp yes")
        expect(seen, "Authentication is required to manage this machine's GPU servers and leases")
        expect(seen, "assword:")
    with check("alice cannot release, renew or park bob's lease, with or without the flag to ask"):
        client.ok("su -l bob -c 'rm -f /tmp/bobs.toml; gpusession request -m 10% -o /tmp/bobs.toml'")
        bobs = client.ok("grep ^id /tmp/bobs.toml").split('"')[1]
        path = client.ok(f"{MANAGER} GetLease s {bobs}").split('"')[1]
        object = f"busctl call org.gpusession1 {path} org.gpusession1.Lease"
        for call in (f"{MANAGER} ReleaseLease s {bobs}", f"{MANAGER} RenewLease st {bobs} 0", f"{object} Release", f"{object} Park"):
            for leave in ("yes", "no"):
                asks = call.replace("busctl", f"busctl --allow-interactive-authorization={leave}")
                expect(client.fails(f"su -l alice -c '{asks}'"), "denied")
        result = client.run(f"su -l alice -c 'gpusession release {bobs}'")
        assert result.code == 77, result
        expect(client.ok("gpusession list"), bobs)
    with check("root releases bob's lease"):
        client.ok(f"gpusession release {bobs}")
        assert bobs not in client.ok("gpusession list")
    with check("a rule in rules.d applies as long as it exists"):
        client.write(RULES, RULE)
        client.until(f"su -l alice -c '{RELOAD}'", 20)
        expect(client.fails(f"su -l bob -c '{RELOAD}'"), "denied")
        expect(client.ok(f"su -l bob -c '{CAN_CREATE}'"), '"no"')
        expect(client.fails(f"su -l bob -c '{create}'"), "denied")
        client.ok(f"rm {RULES}")
        client.until(f"! su -l alice -c '{RELOAD}'", 20)
        client.until(f"su -l bob -c '{CAN_CREATE}' | grep -E 'yes|busy'", 20)
        client.ok("! journalctl -b -u gpusession --no-pager | grep 'polkit does not decide'")
        client.ok("rm /etc/gpusession/conf.d/extra.toml && systemctl reload gpusession")
    with check("root can do all of this"):
        client.ok("gpusession release " + lease(client, "of-root"))
        client.ok("systemctl restart gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
    def policy(text):
        client.write("/etc/gpusession/conf.d/policy.toml", text)
        client.ok("gpusession reload")

    with check("groups: members have GPUs; alice, who is in none, has no GPU, nor has root with root = false"):
        client.ok("groupadd --force gpu && usermod -aG gpu bob")
        policy('[access]\nusers = []\ngroups = ["gpu"]\nroot = false\n')
        expect(client.ok("ssh bob@client vectorAdd"), "sums right")
        expect(client.fails("ssh alice@client vectorAdd"), "cudaErrorNoDevice")
        expect(client.fails("vectorAdd"), "cudaErrorNoDevice")
    with check("root = false: sudo, sudo -i and system units have no GPU, sudo -u has"):
        policy('[access]\nroot = false\n')
        for how in ("sudo -S", "sudo -S -i"):
            seen = client.fails(f"echo secret | ssh alice@client {how} env GPUSESSION_TRACE=why vectorAdd")
            expect(seen, "[access] does not let root use this machine's GPUs")
        expect(client.fails("systemd-run --quiet --collect --wait --pipe vectorAdd"), "cudaErrorNoDevice")
        expect(client.ok("echo secret | ssh alice@client sudo -S -u bob vectorAdd"), "sums right")
        expect(client.ok("systemd-run --quiet --wait --pipe -p User=alice vectorAdd"), "sums right")
    with check("extra_leases = 1: alice creates one lease besides the configured ones, by command or D-Bus, but not two"):
        policy("[access]\nextra_leases = 1\n")
        request = "gpusession request -n 1 -m 10% -o /tmp/{}.toml"
        expect(client.ok(f"ssh alice@client 'rm -f /tmp/one.toml; {request.format('one')}'"), "use it: gpusession run --lease")
        result = client.run(f"su -l alice -c '{request.format('two')}'")
        assert result.code == 77 and "extra_leases = 1" in result.out, result
        expect(client.fails(f"su -l alice -c '{create}'"), "holds 1 lease(s) already")
        result = client.run("su -l alice -c 'gpusession run --new -m 10% -- true'")
        assert result.code == 125 and "extra_leases = 1" in result.out, result
        # Other users may create leases of their own.
        expect(client.ok("su -l bob -c 'gpusession run --new -m 10% -- vectorAdd'"), "sums right")
    with check("only alice can use the lease that she requested"):
        seen = client.ok("ssh alice@client 'gpusession run --lease /tmp/one.toml -- memFree'")
        assert seen == "204", f"10 % of 2048 MiB are free, not {seen}"
        id = client.ok("grep ^id /tmp/one.toml").split('"')[1]
        expect(client.fails(f"ssh bob@client GPUSESSION_LEASE={id} vectorAdd"), "cudaErrorNoDevice")
        assert client.run(f"su -l bob -c 'gpusession release {id}'").code == 77
    with check("its release makes room for another, and gpusession run --new releases its lease at the end"):
        client.ok("ssh alice@client gpusession release /tmp/one.toml")
        assert id not in client.ok("gpusession list")
        by_bus = client.ok(f"su -l alice -c '{create}'").split('"')[1]
        client.ok(f"su -l alice -c 'gpusession release {by_bus}'")
        inner = "echo lease \\$GPUSESSION_LEASE; vectorAdd; gpusession list; exit 7"
        seen = client.ok(f"ssh alice@client 'gpusession run --new -m 10% -- sh -c \"{inner}\"; echo status $?'")
        new = next(line.split()[1] for line in seen.splitlines() if line.startswith("lease "))
        expect(seen, "sums right")
        expect(seen, "status 7")
        assert seen.count(new) > 1, seen
        client.until(f"! gpusession list | grep {new}", 10)
    with check("a lease that is not released expires"):
        client.ok("ssh alice@client 'rm -f /tmp/one.toml; gpusession request -m 10% --ttl 3s -o /tmp/one.toml'")
        id = client.ok("grep ^id /tmp/one.toml").split('"')[1]
        client.until(f"! gpusession list | grep {id}", 30)
    with check("a user has at most two persistent leases, even if extra_leases allows more"):
        policy("[access]\nextra_leases = 3\n")
        persistent = [client.ok(f"su -l alice -c '{create}'").split('"')[1] for _ in range(2)]
        expect(client.fails(f"su -l alice -c '{create}'"), "holds 2 persistent leases already")
        client.ok(f"su -l alice -c 'gpusession release {persistent[0]}'")
        persistent[0] = client.ok(f"su -l alice -c '{create}'").split('"')[1]
        for id in persistent:
            client.ok(f"su -l alice -c 'gpusession release {id}'")
    with check("without the policy bob has GPUs again"):
        client.ok("rm /etc/gpusession/conf.d/policy.toml && systemctl reload gpusession")
        expect(client.until("ssh bob@client vectorAdd", 20), "sums right")


def lease(client, name):
    """Returns the id of the lease with this name in the configuration."""
    return client.ok("gpusession list --json | python3 -c \"import json, sys; "
                     f"print(next(l['id'] for l in json.load(sys.stdin)['leases'] if l.get('name') == '{name}'))\"")
