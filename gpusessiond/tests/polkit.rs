//! Who may do what, by a real polkitd on a private bus: needs root, since the daemon and the callers are other users.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::{DAEMON, PATIENCE, PrivateBus, config, engine, serve_on, settings, until, want};
use gpusessiond::bus::Bus;
use gpusessiond::config::Config;
use gpusessiond::leases::engine::Engine;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{LeaseState, Leases as _, Snapshot};

const POLKITD: &str = "/usr/lib/polkit-1/polkitd";

struct Polkit(Child);

impl Polkit {
    /// Knows our actions, which this user owns, and these rules only.
    async fn start(bus: &PrivateBus, owner: &str, rules: &str) -> Self {
        let folder = bus.folder();
        let rules_folder = folder.join("rules.d");
        std::fs::create_dir(&rules_folder).unwrap();
        std::fs::write(rules_folder.join("10-test.rules"), rules).unwrap();
        let actions = folder.join("actions");
        std::fs::create_dir(&actions).unwrap();
        let shipped = include_str!("../../units/polkit-1/actions/org.gpusession1.policy");
        let (owned, count) = ("unix-user:gpusession", shipped.matches("<action id=").count());
        assert_eq!(shipped.matches(owned).count(), count, "the daemon owns each action");
        let policy = shipped.replace(owned, &format!("unix-user:{owner}"));
        std::fs::write(actions.join("org.gpusession1.policy"), policy).unwrap();
        let script = "mount --bind \"$0\" /usr/share/polkit-1/actions && mount --bind \"$1\" /etc/polkit-1/rules.d && exec \"$2\" --no-debug";
        let child = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .args([actions.as_path(), &rules_folder, Path::new(POLKITD)])
            .env("DBUS_SYSTEM_BUS_ADDRESS", bus.address())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let polkit = Self(child);
        let connection = bus.connect().await;
        let names = zbus::fdo::DBusProxy::new(&connection).await.unwrap();
        let there = async {
            while !names.name_has_owner("org.freedesktop.PolicyKit1".try_into().unwrap()).await.unwrap() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, there).await.expect("polkitd does not come");
        polkit
    }
}

impl Drop for Polkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The daemon, which is not root, on a bus that other users reach; `None` where that cannot be.
async fn daemon(sim: &SimServer, config: &Config) -> Option<(PrivateBus, Engine, Bus)> {
    if !nix::unistd::getuid().is_root() || !Path::new(POLKITD).exists() {
        assert!(std::env::var_os("REQUIRE_SYSTEM").is_none(), "needs root and {POLKITD}");
        println!("skipped: needs root and polkitd");
        return None;
    }
    let bus = PrivateBus::start();
    std::fs::set_permissions(bus.folder(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let engine = engine(&[sim]);
    let settings = settings(&engine, config, Path::new("/nonexistent"));
    let api = serve_on(bus.connect_as_daemon().await, &engine, settings).await;
    want(&engine, config).await;
    let there = |s: &Snapshot| {
        s.leases[0].state == LeaseState::Active && s.servers.iter().all(|s| s.state == "online")
    };
    until(&engine, there).await;
    Some((bus, engine, api))
}

/// A lease that a user asks for, which outlives busctl.
const CREATE: [&str; 7] = ["CreateLease", "a{sv}t", "1", "TTLUSec", "t", "60000000", "1"];

fn one_extra() -> Config {
    let mut config = config(&[1]);
    config.access.extra_leases = 1;
    config
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A call of another user.
async fn call(bus: &PrivateBus, user: &str, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new("setpriv");
    command
        .args([&format!("--reuid={user}"), "--clear-groups", "busctl"])
        .arg(format!("--address={}", bus.address()))
        .args(["call", "org.gpusession1", "/org/gpusession1", "org.gpusession1.Manager"])
        .args(arguments);
    command.output().await.unwrap()
}

#[tokio::test]
async fn polkit_says_who_manages_the_pool_and_who_may_lease() {
    let sim = SimServer::new("gpu-a", 8);
    let Some((bus, engine, _api)) = daemon(&sim, &one_extra()).await else { return };
    let rules = r#"
        polkit.addRule(function(action, subject) {
            if (action.id == "org.gpusession1.manage-pool" && subject.user == "daemon") return polkit.Result.YES;
            if (action.id == "org.gpusession1.create-lease") {
                if (subject.user == "games" || subject.user == "lp") return polkit.Result.NO;
            }
            if (action.id == "org.gpusession1.create-lease-for-other" && subject.user == "lp") return polkit.Result.YES;
        });"#;
    let _polkit = Polkit::start(&bus, DAEMON, rules).await;
    let lease = engine.snapshot().borrow().leases[0].id.clone();
    // busctl has words of its own for a refusal.
    // By default an administrator's password, which nobody can give here; by the rule, without.
    let refused = call(&bus, "bin", &["Preallocate", "u", "1"]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let allowed = call(&bus, "daemon", &["Preallocate", "u", "1"]).await;
    assert!(allowed.status.success(), "{}", said(&allowed));
    until(&engine, |s| s.leases.len() == 2 && s.leases[1].state == LeaseState::Active).await;
    let refused = call(&bus, "daemon", &["ReleaseLease", "s", &lease]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));

    // Leases of one's own: yes by default, within extra_leases; not where a rule says no.
    let created = call(&bus, "bin", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
    let again = call(&bus, "bin", &CREATE).await;
    assert!(said(&again).contains("extra_leases = 1"), "{}", said(&again));
    let refused = call(&bus, "games", &CREATE).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    // For somebody else it takes the other action, and only that one; what it makes counts against its owner.
    let games = nix::unistd::User::from_name("games").unwrap().unwrap().uid.to_string();
    let for_other =
        ["CreateLease", "a{sv}t", "2", "TTLUSec", "t", "60000000", "UID", "u", games.as_str(), "1"];
    let refused = call(&bus, "daemon", &for_other).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let created = call(&bus, "lp", &for_other).await;
    assert!(created.status.success(), "{}", said(&created));
    let owner = engine.snapshot().borrow().leases.last().map(|l| l.uid.to_string());
    assert_eq!(owner, Some(games.clone()));
    let again = call(&bus, "lp", &for_other).await;
    assert!(said(&again).contains(&format!("uid {games} holds 1 lease(s) already")), "{}", said(&again));
    for (user, answer) in [("daemon", "yes"), ("games", "no")] {
        let could = call(&bus, user, &["CanCreateLease", "a{sv}", "0"]).await;
        assert_eq!(said(&could).trim(), format!("s \"{answer}\""), "{user}");
    }
    let challenged = call(&bus, "daemon", &["CanCreateLease", "a{sv}", "1", "UID", "u", "3"]).await;
    assert_eq!(said(&challenged).trim(), "s \"challenge\"");
    // What is not allowed on the bus does not even reach the daemon.
    let mut stranger = tokio::process::Command::new("setpriv");
    stranger
        .args(["--reuid=bin", "--clear-groups", "busctl"])
        .arg(format!("--address={}", bus.address()))
        .args([
            "call",
            "org.gpusession1",
            "/org/gpusession1",
            "org.freedesktop.DBus.Properties",
            "Set",
            "ssv",
        ])
        .args(["org.gpusession1.Manager", "State", "s", "ready"]);
    let denied = stranger.output().await.unwrap();
    assert!(
        said(&denied).contains("Access denied") || said(&denied).contains("AccessDenied"),
        "{}",
        said(&denied)
    );
}

#[tokio::test]
async fn a_polkit_that_does_not_decide_allows_nothing() {
    let sim = SimServer::new("gpu-a", 8);
    let Some((bus, _engine, _api)) = daemon(&sim, &one_extra()).await else { return };
    // Without polkit the default holds: yes, and only for oneself.
    let other = ["CanCreateLease", "a{sv}", "1", "UID", "u", "3"];
    let could = call(&bus, "bin", &other).await;
    assert_eq!(said(&could).trim(), "s \"no\"");
    let created = call(&bus, "bin", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
    // One whose actions are somebody else's tells this daemon nothing about other users.
    let _polkit = Polkit::start(&bus, "root", "").await;
    let refused = call(&bus, "games", &CREATE).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let could = call(&bus, "games", &["CanCreateLease", "a{sv}", "0"]).await;
    assert_eq!(said(&could).trim(), "s \"no\"");
    let created = call(&bus, "root", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
}
