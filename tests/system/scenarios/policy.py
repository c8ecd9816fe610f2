"""Who may do what: access by user, no leases beyond policy, nobody else's leases, the service is root's."""
from harness import expect
from scenarios.login import PODMAN, box

ORDER = 30
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


def run(site, check):
    client = site.client
    create = CREATE.format()
    with check("a reload takes the policy over, and keeps the lease"):
        before = lease(client, "everyone")
        client.write("/etc/gpusession/conf.d/policy.toml", POLICY)
        client.ok("systemctl reload gpusession")
        client.until("gpusession list --json | grep -q of-root", 20)
        assert lease(client, "everyone") == before
    with check("bob without access has no GPU, and no noise at login"):
        expect(client.fails("ssh bob@client vectorAdd"), "cudaErrorNoDevice")
        seen = client.ok("ssh bob@client true")
        assert seen == "", seen
    with check("the journal says whom it refuses, and journalctl -x what to do"):
        denied = "journalctl -b -t gpusessiond MESSAGE_ID=4195922267ea4a9eba8b2031c74f4446 GPUSESSION_USER=1001 --no-pager"
        client.until(f"{denied} -o cat | grep bob", 10)
        expect(client.ok(f"{denied} -x"), "[access] and [[lease]] in gpusession.toml say who has GPUs")
    with check("alice has"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
    with check("in a container without root, alice has and her subordinate uids have not"):
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
    with check("polkit says who manages the pool and who creates leases: by default an administrator, and everyone"):
        client.write("/etc/gpusession/conf.d/extra.toml", "[access]\nextra_leases = 1\n")
        client.ok("systemctl reload gpusession")
        client.until(f"su -l alice -c '{CAN_CREATE}' | grep -qv no", 20)
        expect(client.fails(f"su -l alice -c '{RELOAD}'"), "denied")
        client.ok(f"su -l bob -c '{CAN_CREATE}' | grep -E 'yes|busy'")
    with check("a rule in rules.d is obeyed, and for as long as it is there"):
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
    with check("root can do all of it"):
        client.ok("gpusession release " + lease(client, "of-root"))
        client.ok("systemctl restart gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
    def policy(text):
        client.write("/etc/gpusession/conf.d/policy.toml", text)
        client.ok("gpusession reload")

    with check("groups: whoever is in one has, alice who is not has none, nor has root with root = false"):
        client.ok("groupadd --force gpu && usermod -aG gpu bob")
        policy('[access]\nusers = []\ngroups = ["gpu"]\nroot = false\n')
        expect(client.ok("ssh bob@client vectorAdd"), "sums right")
        expect(client.fails("ssh alice@client vectorAdd"), "cudaErrorNoDevice")
        expect(client.fails("vectorAdd"), "cudaErrorNoDevice")
    with check("root = false: sudo, sudo -i and system units have none, sudo -u has"):
        policy('[access]\nroot = false\n')
        for how in ("sudo -S", "sudo -S -i"):
            seen = client.fails(f"echo secret | ssh alice@client {how} env GPUSESSION_TRACE=why vectorAdd")
            expect(seen, "[access] does not let root use this machine's GPUs")
        expect(client.fails("systemd-run --quiet --collect --wait --pipe vectorAdd"), "cudaErrorNoDevice")
        expect(client.ok("echo secret | ssh alice@client sudo -S -u bob vectorAdd"), "sums right")
        expect(client.ok("systemd-run --quiet --wait --pipe -p User=alice vectorAdd"), "sums right")
    with check("extra_leases = 1: alice makes one lease beside the configured ones, by command or D-Bus, and not two"):
        policy("[access]\nextra_leases = 1\n")
        request = "gpusession request -n 1 -m 10% -o /tmp/{}.toml"
        expect(client.ok(f"ssh alice@client 'rm -f /tmp/one.toml; {request.format('one')}'"), "use it: gpusession run --lease")
        result = client.run(f"su -l alice -c '{request.format('two')}'")
        assert result.code == 77 and "extra_leases = 1" in result.out, result
        expect(client.fails(f"su -l alice -c '{create}'"), "holds 1 lease(s) already")
        result = client.run("su -l alice -c 'gpusession run --new -m 10% -- true'")
        assert result.code == 125 and "extra_leases = 1" in result.out, result
        # Others have their own.
        expect(client.ok("su -l bob -c 'gpusession run --new -m 10% -- vectorAdd'"), "sums right")
    with check("the lease that she asked for is hers to use, and nobody else's"):
        seen = client.ok("ssh alice@client 'gpusession run --lease /tmp/one.toml -- memFree'")
        assert seen == "204", f"10 % of 2048 MiB are free, not {seen}"
        id = client.ok("grep ^id /tmp/one.toml").split('"')[1]
        expect(client.fails(f"ssh bob@client GPUSESSION_LEASE={id} vectorAdd"), "cudaErrorNoDevice")
        assert client.run(f"su -l bob -c 'gpusession release {id}'").code == 77
    with check("released, it makes room for another, and gpusession run --new gives its own back at the end"):
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
    with check("a lease that nobody releases ends with its time"):
        client.ok("ssh alice@client 'rm -f /tmp/one.toml; gpusession request -m 10% --ttl 3s -o /tmp/one.toml'")
        id = client.ok("grep ^id /tmp/one.toml").split('"')[1]
        client.until(f"! gpusession list | grep {id}", 30)
    with check("without the policy bob has GPUs again"):
        client.ok("rm /etc/gpusession/conf.d/policy.toml && systemctl reload gpusession")
        expect(client.until("ssh bob@client vectorAdd", 20), "sums right")


def lease(client, name):
    """The id of a lease by the name it has in the configuration."""
    return client.ok("gpusession list --json | python3 -c \"import json, sys; "
                     f"print(next(l['id'] for l in json.load(sys.stdin)['leases'] if l.get('name') == '{name}'))\"")
