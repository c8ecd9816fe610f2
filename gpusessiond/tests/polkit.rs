//! Authorization by a real polkitd on a private bus.
//!
//! Needs root, since daemon and callers run as different users.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use gpusession_test_daemon::{
    DAEMON, PrivateBus, TEST_TIMEOUT, config, engine, serve_on, settings, until, want,
};
use gpusessiond::bus::Bus;
use gpusessiond::config::Config;
use gpusessiond::leases::engine::Engine;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{LeaseState, Leases as _, Snapshot};

const POLKITD: &str = "/usr/lib/polkit-1/polkitd";

struct Polkit(Child);

impl Polkit {
    /// Starts polkitd with only gpusession's actions, owned by this user, and these rules.
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
        tokio::time::timeout(TEST_TIMEOUT, there).await.expect("polkitd does not come");
        polkit
    }
}

impl Drop for Polkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the daemon's API without root's rights, on a bus that other users reach.
///
/// Returns `None` if the host does not permit that.
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
        s.leases[0].facts.state == LeaseState::Active && s.server_facts().all(|s| s.state == "online")
    };
    until(&engine, there).await;
    Some((bus, engine, api))
}

/// Arguments for a lease that outlives busctl.
const CREATE: [&str; 7] = ["CreateLease", "a{sv}t", "1", "TTLUSec", "t", "60000000", "1"];

fn one_extra() -> Config {
    let mut config = config(&[1]);
    config.access.extra_leases = 1;
    config
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Calls a method as another user.
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
    let lease = engine.snapshot().borrow().leases[0].facts.id.clone();
    // busctl prints its own text for a refusal. By default the action needs an administrator's
    // password, which cannot be entered here; by the rule it needs none.
    let refused = call(&bus, "bin", &["Preallocate", "u", "1"]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let allowed = call(&bus, "daemon", &["Preallocate", "u", "1"]).await;
    assert!(allowed.status.success(), "{}", said(&allowed));
    until(&engine, |s| s.leases.len() == 2 && s.leases[1].facts.state == LeaseState::Active).await;
    let refused = call(&bus, "daemon", &["ReleaseLease", "s", &lease]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));

    // Own leases are allowed by default within extra_leases, unless a rule forbids it.
    let created = call(&bus, "bin", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
    let again = call(&bus, "bin", &CREATE).await;
    assert!(said(&again).contains("extra_leases = 1"), "{}", said(&again));
    let refused = call(&bus, "games", &CREATE).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    // A lease for another user needs only the other action, and counts against its owner.
    let games = nix::unistd::User::from_name("games").unwrap().unwrap().uid.to_string();
    let for_other =
        ["CreateLease", "a{sv}t", "2", "TTLUSec", "t", "60000000", "UID", "u", games.as_str(), "1"];
    let refused = call(&bus, "daemon", &for_other).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let created = call(&bus, "lp", &for_other).await;
    assert!(created.status.success(), "{}", said(&created));
    let owner = engine.snapshot().borrow().lease_facts().last().map(|l| l.uid.to_string());
    assert_eq!(owner, Some(games.clone()));
    let again = call(&bus, "lp", &for_other).await;
    assert!(said(&again).contains(&format!("uid {games} holds 1 lease(s) already")), "{}", said(&again));
    for (user, answer) in [("daemon", "yes"), ("games", "no")] {
        let could = call(&bus, user, &["CanCreateLease", "a{sv}", "0"]).await;
        assert_eq!(said(&could).trim(), format!("s \"{answer}\""), "{user}");
    }
    let challenged = call(&bus, "daemon", &["CanCreateLease", "a{sv}", "1", "UID", "u", "3"]).await;
    assert_eq!(said(&challenged).trim(), "s \"challenge\"");
    // The bus rejects a forbidden call before it reaches the daemon.
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
    // Without polkit the packaged default applies: own leases only.
    let other = ["CanCreateLease", "a{sv}", "1", "UID", "u", "3"];
    let could = call(&bus, "bin", &other).await;
    assert_eq!(said(&could).trim(), "s \"no\"");
    let created = call(&bus, "bin", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
    // A polkitd whose actions belong to another user does not answer this daemon about other users.
    let _polkit = Polkit::start(&bus, "root", "").await;
    let refused = call(&bus, "games", &CREATE).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let could = call(&bus, "games", &["CanCreateLease", "a{sv}", "0"]).await;
    assert_eq!(said(&could).trim(), "s \"no\"");
    let created = call(&bus, "root", &CREATE).await;
    assert!(created.status.success(), "{}", said(&created));
}
