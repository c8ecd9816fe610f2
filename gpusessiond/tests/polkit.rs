//! Who may do what, by a real polkitd on a private bus: needs root, since the callers are other users.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::{PATIENCE, PrivateBus, config, engine, serve, until, want};
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{LeaseState, Leases as _};

const POLKITD: &str = "/usr/lib/polkit-1/polkitd";

struct Polkit(Child);

impl Polkit {
    /// Knows our actions and these rules only; `None` where polkit cannot run.
    async fn start(bus: &PrivateBus, rules: &str) -> Option<Self> {
        if !nix::unistd::getuid().is_root() || !Path::new(POLKITD).exists() {
            println!("skipped: needs root and polkitd");
            return None;
        }
        let folder = bus.folder();
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let rules_folder = folder.join("rules.d");
        std::fs::create_dir(&rules_folder).unwrap();
        std::fs::write(rules_folder.join("10-test.rules"), rules).unwrap();
        let actions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../units/polkit-1/actions");
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
        Some(polkit)
    }
}

impl Drop for Polkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
    let bus = PrivateBus::start();
    let rules = r#"
        polkit.addRule(function(action, subject) {
            if (action.id == "org.gpusession1.manage-pool" && subject.user == "daemon") return polkit.Result.YES;
            if (action.id == "org.gpusession1.create-lease" && subject.user == "games") return polkit.Result.NO;
        });"#;
    let Some(_polkit) = Polkit::start(&bus, rules).await else { return };
    let sim = SimServer::new("gpu-a", 8);
    let engine = engine(&[&sim]);
    let mut config = config(&[1]);
    config.access.extra_leases = 1;
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    until(&engine, |s| s.leases[0].state == LeaseState::Active && s.servers[0].state == "online").await;

    let lease = engine.snapshot().borrow().leases[0].id.clone();
    // busctl has words of its own for a refusal.
    let said = |output: &Output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    // By default an administrator's password, which nobody can give here; by the rule, without.
    let refused = call(&bus, "bin", &["Preallocate", "u", "1"]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    let allowed = call(&bus, "daemon", &["Preallocate", "u", "1"]).await;
    assert!(allowed.status.success(), "{}", said(&allowed));
    until(&engine, |s| s.leases.len() == 2 && s.leases[1].state == LeaseState::Active).await;
    let refused = call(&bus, "daemon", &["ReleaseLease", "s", &lease]).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));

    // Leases of one's own: yes by default, within extra_leases; not where a rule says no.
    let persistent = ["CreateLease", "a{sv}t", "1", "TTLUSec", "t", "60000000", "1"];
    let created = call(&bus, "bin", &persistent).await;
    assert!(created.status.success(), "{}", said(&created));
    let again = call(&bus, "bin", &persistent).await;
    assert!(said(&again).contains("Access denied"), "{}", said(&again));
    let refused = call(&bus, "games", &persistent).await;
    assert!(said(&refused).contains("Access denied"), "{}", said(&refused));
    for (user, answer) in [("daemon", "yes"), ("games", "no")] {
        let could = call(&bus, user, &["CanCreateLease", "a{sv}", "0"]).await;
        assert_eq!(said(&could).trim(), format!("s \"{answer}\""), "{user}");
    }
    let challenged = call(&bus, "daemon", &["CanCreateLease", "a{sv}", "1", "UID", "u", "2"]).await;
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
