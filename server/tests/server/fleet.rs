//! Fleet keys: a token for each name, derived without a server.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Output, Stdio};

use gpusession_proto::join::FleetKey;
use gpusession_test_server::Server;
use gpusession_test_support::json_table;
use nix::sys::signal::Signal;
use serde_json::Value;
use tonic::Code;

/// Creates a fleet key, and returns its text.
pub(crate) fn key(server: &Server, words: &[&str]) -> String {
    let made = server.json(&[&["fleet", "create"], words].concat());
    made["fleet"]["key"].as_str().unwrap().to_owned()
}

/// Returns the id of a key and of its tokens.
fn id(key: &str) -> String {
    data_encoding::HEXLOWER.encode(&key.parse::<FleetKey>().unwrap().of_tokens.id)
}

/// Runs `fleet token` with the key on standard input, where no configuration and no state is.
fn derivation(server: &Server, key: &str, words: &[&str]) -> Output {
    let mut command = server.command(&[&["fleet", "token"], words].concat());
    command.env_clear().env("GPUSERVER_CONF", "/nonexistent/gpuserver.toml");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(key.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Derives a client's token.
pub(crate) fn derived(server: &Server, key: &str, name: &str) -> String {
    let output = derivation(server, key, &["-", "--name", name]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn row(server: &Server, id: &str) -> Value {
    let listed = server.json(&["token", "list"])["tokens"].as_array().unwrap().clone();
    listed.into_iter().find(|token| token["id"] == id).unwrap_or_default()
}

#[tokio::test]
async fn a_derived_token_is_good_for_its_name_alone_and_again_after_forget() {
    let mut server = Server::start().await;
    let made = server.json(&["fleet", "create", "--name", "vm-*", "--uses", "3", "--from", "127.0.0.1"]);
    json_table::documented("gpuserver fleet create", &made);
    let key = made["fleet"]["key"].as_str().unwrap();
    let id = id(key);
    assert_eq!(made["fleet"]["id"], id);
    let token = derived(&server, key, "vm-7");
    let shown = derivation(&server, "", &[key, "--name", "vm-7", "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    json_table::documented("gpuserver fleet token", &shown);
    assert_eq!(
        (&shown["token"]["token"], &shown["token"]["id"]),
        (&token.as_str().into(), &id.as_str().into())
    );

    // Refused: another name, a name outside of the pattern, and the key itself.
    let other = server.enrol(&token, "vm-8", "m").await.unwrap_err();
    assert_eq!(other.code(), Code::PermissionDenied);
    assert!(other.message().contains("derived for another name than \"vm-8\""), "{other}");
    for (name, why) in
        [("db-1", "for clients named \"vm-*\", not for \"db-1\""), ("VM 7", "not a client's name")]
    {
        let refused = derivation(&server, key, &["--name", name]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(why), "{refused:?}");
    }
    let wide = FleetKey { pattern: "*".into(), ..key.parse().unwrap() };
    let outside = server.enrol(&derived(&server, &wide.to_text(), "db-1"), "db-1", "m").await.unwrap_err();
    assert!(outside.message().contains("for clients named \"vm-*\", not for \"db-1\""), "{outside}");
    assert_eq!(server.enrol(key, "vm-7", "m").await.unwrap_err().code(), Code::InvalidArgument);
    let no_key = derivation(&server, &token, &["--name", "vm-7"]);
    assert!(String::from_utf8_lossy(&no_key.stderr).contains("not a fleet key"), "{no_key:?}");
    assert_eq!(row(&server, &id)["uses_left"], 3, "a refusal uses up nothing");

    // One machine has the name until an administrator forgets it, also while it is revoked.
    server.enrol(&token, "vm-7", "m1").await.unwrap();
    assert_eq!(server.enrol(&token, "vm-7", "m2").await.unwrap_err().code(), Code::AlreadyExists);
    assert!(server.verb(&["clients", "revoke", "vm-7"]).status.success());
    assert_eq!(server.enrol(&token, "vm-7", "m1").await.unwrap_err().code(), Code::PermissionDenied);
    assert!(server.verb(&["clients", "forget", "vm-7"]).status.success());
    server.enrol(&token, "vm-7", "m2").await.unwrap();

    // The key outlives the server's process, in a file of the signer's own.
    server.signal(Signal::SIGTERM);
    let mode = std::fs::metadata(server.path("state/tokens.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    server.run().await;
    server.enrol(&derived(&server, key, "vm-9"), "vm-9", "m").await.unwrap();
    let used_up = server.enrol(&derived(&server, key, "vm-8"), "vm-8", "m").await.unwrap_err();
    assert!(used_up.message().contains("the fleet key of the join token is used up"), "{used_up}");

    let listed = row(&server, &id);
    assert_eq!((&listed["name_pattern"], &listed["uses_left"]), (&"fleet vm-*".into(), &0.into()));
    let trail = server.json(&["audit"])["audit"].to_string();
    assert!(trail.contains("fleet-create") && trail.contains(&format!("token {id}")), "{trail}");
    let secret = &key[key.len() - 20..];
    assert!(!trail.contains(secret) && !server.json(&["token", "list"]).to_string().contains(secret));
}

#[tokio::test]
async fn a_revoked_fleet_key_lets_nobody_join_and_bounds_have_limits() {
    let mut server = Server::start().await;
    let key = self::key(&server, &["--name", "vm-*"]);
    let id = id(&key);
    let token = derived(&server, &key, "vm-1");
    server.enrol(&token, "vm-1", "m").await.unwrap();
    assert_eq!(server.json(&["token", "revoke", &id[..8]])["token"]["id"], id.as_str());
    assert_eq!(row(&server, &id), Value::Null);
    assert!(server.verb(&["clients", "forget", "vm-1"]).status.success());
    for name in ["vm-1", "vm-2"] {
        let revoked = server.enrol(&derived(&server, &key, name), name, "m").await.unwrap_err();
        assert_eq!(revoked.code(), Code::PermissionDenied);
        assert!(revoked.message().contains("revoked, or the fleet key that it is of"), "{revoked}");
    }
    let elsewhere = self::key(&server, &["--name", "vm-*", "--from", "192.0.2.0/24"]);
    let refused = server.enrol(&derived(&server, &elsewhere, "vm-1"), "vm-1", "m").await.unwrap_err();
    assert!(refused.message().contains("fleet key of the join token is not for clients at 127"), "{refused}");
    for (words, why) in [
        (
            &["fleet", "create", "--name", "vm-*", "--ttl", "366d"][..],
            "a fleet key is valid for 365 days at most",
        ),
        (&["fleet", "create"], "--name"),
        (&["--server", "127.0.0.1", "fleet", "token", &key, "--name", "vm-1"], "without --server"),
    ] {
        let refused = server.verb(words);
        assert_eq!(refused.status.code(), Some(1), "{words:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(why), "{refused:?}");
    }
    // Also while the server does not run.
    server.signal(Signal::SIGTERM);
    let key = self::key(&server, &["--name", "vm-*"]);
    server.run().await;
    server.enrol(&derived(&server, &key, "vm-1"), "vm-1", "m").await.unwrap();
}
