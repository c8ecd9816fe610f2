"""Who may do what: access by user, no leases beyond policy, nobody else's leases, the service is root's."""
from harness import expect

ORDER = 30
CREATE = ("busctl call org.gpusession1 /org/gpusession1 org.gpusession1.Manager CreateLease a{{sv}}t "
          "2 Count u 1 TTLUSec t 600000000 1")
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
    with check("alice has"):
        expect(client.ok("ssh alice@client vectorAdd"), "sums right")
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
    with check("without the policy bob has GPUs again"):
        client.ok("rm /etc/gpusession/conf.d/policy.toml && systemctl reload gpusession")
        expect(client.until("ssh bob@client vectorAdd", 20), "sums right")


def lease(client, name):
    """The id of a lease by the name it has in the configuration."""
    return client.ok("gpusession list --json | python3 -c \"import json, sys; "
                     f"print(next(l['id'] for l in json.load(sys.stdin)['leases'] if l.get('name') == '{name}'))\"")
