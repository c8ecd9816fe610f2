//! The shipped file and the manual come from the rows, and each key has a consumer.

use std::path::Path;

use gpusession_common::keys::{manual, manual_table, sample, sample_table, uncommented, unread, up_to_date};

use super::*;
use crate::config::keys::{GpuSharing, ReserveKeys};

/// Introduction of the manual's section about limits.
const LIMIT_TABLES: &[&str] = &[
    "Limits of everyone, a group, a client and a user.",
    "A client has the limit for everyone unless another one applies to it.",
    "A user's limits apply in addition to the client's.",
    "The client reports the user's name, so the name can reduce the client's limit and never raise it.",
    "If several apply, the smallest wins.",
    "A group has members: `clients` (patterns) and `users`; its limits apply to each of them.",
    "A group, a client or a user may also have `warn_after`, `park_after`, `release_after`, `lend_after` \
     and `resume_grace`; for everyone they are keys outside [limits].",
    "Of `resume_grace` 0 counts as the smallest, of the other times as the largest.",
    "The defaults below are those of [limits].",
    "Programs on a lease for all users of a machine count for their users by `workers`, `connections`, \
     `host_memory` and `threads`.",
];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Rows of `[limits]`.
fn limits() -> Vec<gpusession_common::keys::Row> {
    LIMITS.iter().filter(|l| !TOP_LEVEL.contains(&l.name)).map(|l| l.row).collect()
}

#[test]
fn the_manual_comes_from_the_rows() {
    let layers = "[limits], [limits.group.NAME], [limits.client.NAME], [limits.user.NAME]";
    let text = [
        ".SH KEYS\n".into(),
        manual(Keys::ROWS),
        manual_table("[gpu_sharing]", GpuSharing::ABOUT, GpuSharing::ROWS),
        manual_table("[users]", Users::ABOUT, Users::ROWS),
        manual_table(layers, LIMIT_TABLES, &limits()),
        manual_table("[[reserve]]", ReserveKeys::ABOUT, ReserveKeys::ROWS),
    ]
    .concat();
    up_to_date(&file("docs/man/gpuserver.toml.5"), ".SH KEYS", ".SH ENVIRONMENT", &text).unwrap();
}

#[test]
fn the_shipped_file_comes_from_the_rows() {
    let limits_for_all = ["Limits for everyone without other limits."];
    let text = [
        sample(Keys::ROWS).trim_start().into(),
        "\n# ---- Tables\n".into(),
        sample_table("[gpu_sharing]", GpuSharing::ABOUT, GpuSharing::ROWS),
        sample_table("[users]", Users::ABOUT, Users::ROWS),
        sample_table("[limits]", &limits_for_all, &limits()),
        sample_table("[[reserve]]", ReserveKeys::ABOUT, ReserveKeys::ROWS),
        "\n".into(),
    ]
    .concat();
    let path = file("packaging/etc/gpuserver.toml");
    up_to_date(&path, "# ---- ", "# ---- Examples", &text).unwrap();
    // All of it is a comment, and the configuration without the # signs works and changes nothing.
    let written = uncommented(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (shipped, without) = (parse(&written).unwrap(), parse("").unwrap());
    let value = |of: &Config, key: &str| of.report.iter().find(|(k, ..)| k == key).map(|(_, v, _)| v.clone());
    for row in keys() {
        assert!(matches!(shipped.origin(row.name), Origin::File(..)), "{} is missing", row.name);
        if row.fixed {
            assert_eq!(value(&shipped, row.name), value(&without, row.name), "{}", row.name);
        }
    }
    for limit in LIMITS.iter().filter(|l| !TOP_LEVEL.contains(&l.name)) {
        let bound = Bound::parse(limit.kind, &value(&shipped, limit.row.name).unwrap());
        assert_eq!(bound, Bound::parse(limit.kind, limit.default()), "{}", limit.name);
    }
}

/// Keys with one possible value, which no code has to ask for.
const ONE_VALUE: [&str; 2] = ["registry", "compute_mode"];

#[test]
fn each_key_has_a_consumer() {
    let rows = Keys::ROWS.iter().chain(Users::ROWS).filter(|row| !ONE_VALUE.contains(&row.name));
    let unread = unread(&file("server/src"), rows).unwrap();
    assert!(unread.is_empty(), "no code reads {unread:?}");
}

/// Yields path and text of each source file below a folder, tests left out.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            found.append(&mut sources(&path));
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
}

/// A live key's value is present where code asks for it by `pool.config()`. Code that has the
/// configuration of the start keeps a copy, which `Pool::reload` has to replace.
#[test]
fn a_reload_passes_on_each_live_value_that_the_start_copies() {
    // Other programs, which read the files themselves, and the checks of the files.
    const ELSEWHERE: [&str; 2] = ["cli", "config"];
    let folder = file("server/src");
    let reload = std::fs::read_to_string(folder.join("pool/reload.rs")).unwrap();
    let reads = |text: &str, value: &str| {
        let mut ends = text.match_indices(value).map(|(at, found)| at + found.len());
        ends.any(|end| !text[end..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
    };
    let live = keys().filter(|row| row.live).map(|row| row.name).chain(["rules", "limits"]);
    let mut copied = 0;
    for value in live.map(|name| format!("config.{name}")) {
        for (path, text) in sources(&folder) {
            let within = |name| path.starts_with(folder.join(name));
            if ELSEWHERE.into_iter().any(within) || path.ends_with("pool/reload.rs") {
                continue;
            }
            // The pool has the present configuration, but for its facts.
            let stale = if within("pool") { format!("facts.{value}") } else { value.clone() };
            if reads(&text, &stale) {
                copied += 1;
                let path = path.display();
                assert!(reads(&reload, &value), "{path} reads {stale}: Pool::reload passes its changes on");
            }
        }
    }
    assert!(copied >= 4, "the start copies {copied} values only");
}
