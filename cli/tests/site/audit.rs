//! Users in the server's audit trail, with the daemon and a program.

use super::*;

/// Reads all files of the trail.
fn files(site: &Site) -> String {
    let files = std::fs::read_dir(site.path("server/audit")).unwrap().map(|entry| entry.unwrap().path());
    let days = files.filter(|path| path.extension().is_some_and(|e| e == "jsonl"));
    days.map(|day| std::fs::read_to_string(day).unwrap()).collect()
}

/// Returns the users of programs in the trail that the words select, each once.
fn users(site: &Site, words: &[&str]) -> Vec<String> {
    let words = [&["audit", "--event", "program-started", "--json"], words].concat();
    let answer: serde_json::Value = serde_json::from_str(&site.gpuserver(&words)).unwrap();
    let lines = answer["audit"].as_array().unwrap();
    let mut users: Vec<_> = lines.iter().map(|line| line["user"].as_str().unwrap().to_owned()).collect();
    users.dedup();
    users
}

#[test]
fn the_trail_forgets_a_user() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let daemon = site.start_daemon();
    site.lease();
    let program = site.cuda_program();
    site.until("the program in the trail", |site| (!users(site, &[]).is_empty()).then_some(()));
    let user = users(&site, &[]).remove(0);
    assert!(!user.is_empty() && !user.starts_with("u-"), "{user}");
    assert_eq!(users(&site, &["--user", &user]), std::slice::from_ref(&user));
    let name = format!("\"{user}\"");
    assert!(
        !files(&site).contains(&name) && !files(&site).contains(&format!("\\{name}")),
        "the files have no name"
    );

    let forget =
        |user: &str| site.server_command().args(["audit", "forget-user", "vm-1", user]).output().unwrap();
    let refused = forget("nobody-of-that-name");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(text(&refused.stderr).contains("no user"), "{refused:?}");
    let done = forget(&user);
    assert!(done.status.success() && text(&done.stdout).contains("pseudonym"), "{done:?}");
    assert!(users(&site, &["--user", &user]).is_empty());
    let shown = users(&site, &[]);
    assert!(shown.len() == 1 && shown[0].starts_with("u-"), "{shown:?}");
    assert!(site.gpuserver(&["audit", "--event", "audit-forget-user"]).contains("vm-1"));

    // The end of the program has the name again, and a stopped server's trail forgets it, too.
    program.kill();
    site.until("the end of the program", |site| {
        let words = ["audit", "--event", "program-ended", "--user", &user, "--json"];
        site.gpuserver(&words).contains("vm-1").then_some(())
    });
    daemon.stop();
    assert_eq!(server.stop(), 0);
    let done = forget(&user);
    assert!(done.status.success(), "{done:?}");
    assert!(!std::fs::read_to_string(site.path("server/audit/names.json")).unwrap().contains(&name));
    assert!(site.gpuserver(&["audit", "verify"]).contains("lines verify"));
}
