//! Tests of the configuration: defaults, merging, errors, and the manual.

use gpusession_common::keys::{manual, manual_table, sample, sample_table, uncommented, unread, up_to_date};
use gpusession_common::units::Memory;

use super::*;

fn load(texts: &[&str]) -> Result<Config, String> {
    let texts: Vec<_> = texts
        .iter()
        .enumerate()
        .map(|(i, t)| (PathBuf::from(format!("{i}.toml")), (*t).to_owned()))
        .collect();
    Config::from_texts(&texts).map_err(|e| e.to_string())
}

#[test]
fn defaults_are_those_of_the_documentation() {
    let config = load(&[]).unwrap();
    assert_eq!(config.keys.wait_ms, 5000);
    assert_eq!(config.access.users, ["*"]);
    assert!(config.access.root);
    assert_eq!(config.access.extra_leases, 0);
    let config = load(&["[[lease]]"]).unwrap();
    assert_eq!(config.leases[0], LeaseConfig { name: "lease1".into(), ..LeaseConfig::default() });
}

#[test]
fn later_files_win_and_leases_append() {
    let config = load(&[
        "wait_ms = 1\nlog_level = \"debug\"\n[access]\nusers = [\"alice\"]\n[[lease]]\nname = \"a\"\n",
        "wait_ms = 2\n[access]\nroot = false\n[[lease]]\nname = \"b\"\nmemory = \"50%\"\n",
    ])
    .unwrap();
    assert_eq!(config.keys.wait_ms, 2);
    assert_eq!(config.keys.log_level, "debug");
    assert_eq!(config.access.users, ["alice"]);
    assert!(!config.access.root);
    let names: Vec<_> = config.leases.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let error = load(&["[[lease]]\nname = \"lease2\"\n", "[[lease]]\n"]).unwrap_err();
    let expected = "1.toml: [[lease]] number 2 has no name, and its default `lease2` is taken in 0.toml; \
                    give it a name";
    assert_eq!(error, expected);
    let error = load(&["[[lease]]\n[[lease]]\nname = \"lease1\"\n"]).unwrap_err();
    assert!(error.starts_with("0.toml: [[lease]] number 1 has no name"), "{error}");
    assert_eq!(config.leases[1].memory, Memory::Percent(50.0));
}

#[test]
fn errors_name_file_line_and_what_is_meant() {
    let cases = [
        ("wait_ms = 1\n\n[[lease]]\ngpuss = 2\n", "0.toml:4:1: unknown key `gpuss`, did you mean `gpus`?"),
        ("[acess]\n", "0.toml:1:2: unknown key `acess`, did you mean `access`?"),
        (
            "wait_ms = 1\n[lease]\ngpus = 1\n",
            "0.toml:2:1: [lease] is one table, and there can be several; write [[lease]]",
        ),
        ("[[lease]]\nmemory = \"4000MB\"\n", "0.toml:2:10: `4000MB` is not a size: write MiB"),
        ("wait_ms = \"5s\"\n", "0.toml:1:11: invalid type: string \"5s\", expected u64"),
        ("[[lease]]\ngpus = 0\n", "0.toml:2:8: gpus: 0 is not between 1 and 64"),
        (
            "[environment]\nLD_PRELOAD = \"x\"\n",
            "0.toml: environment: `LD_PRELOAD`: belongs to the loader, the shell or the login, and is never \
             set at login; set it where the program is started",
        ),
        (
            "[environment]\nGPUSESSION_ID = \"x\"\n",
            "0.toml: environment: `GPUSESSION_ID`: each session gets its own; remove it",
        ),
        (
            "[environment]\n\"A B\" = \"x\"\n",
            "0.toml: environment: `A B`: not the name of a variable: at most 64 letters, digits and _, no digit in \
             front",
        ),
        (
            "[environment]\nA = \"$HOME\"\n",
            "0.toml: environment: `A`: the value may have letters, digits and plain signs of ASCII only: no quote, \
             backslash, dollar sign or control character",
        ),
        ("[environment]\nA = 1\n", "0.toml:2:5: invalid type: integer `1`, expected a string"),
        ("[[lease]]\nname=\"x\"\n[[lease]]\nname=\"x\"\n", "0.toml: two [[lease]] are named `x`; rename one"),
    ];
    for (text, expected) in cases {
        assert_eq!(load(&[text]).unwrap_err(), expected);
    }
    let error = load(&["[[lease]]\npriority = \"high\"\n"]).unwrap_err();
    assert!(error.contains("0.toml:2:12") && error.contains("below-normal"), "{error}");
    let error = load(&["[client]\nzzzzzzzzzz = 1\n"]).unwrap_err();
    assert!(error.contains("unknown key `zzzzzzzzzz`, known keys: name"), "{error}");
    assert!(load(&["[[lease]\n"]).unwrap_err().starts_with("0.toml:1:"));
}

#[test]
fn any_other_variable_may_be_set_at_login() {
    let config = load(&[
        "[environment]\nHF_HOME = \"/srv/models\"\nhttp_proxy = \"http://proxy:3128\"\nPYTHONPATH = \"\"\n",
        "[environment]\nHF_HOME = \"/srv/others\"\n",
    ]);
    let environment: Vec<_> = config.unwrap().environment.into_iter().collect();
    let expected = [("HF_HOME", "/srv/others"), ("PYTHONPATH", ""), ("http_proxy", "http://proxy:3128")];
    assert_eq!(environment, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    // At most as many as the PAM module takes; the session's id is one of them.
    let many = |n: usize, value: &str| {
        let lines: String = (0..n).map(|i| format!("X{i} = \"{value}\"\n")).collect();
        load(&[&format!("[environment]\n{lines}")])
    };
    assert!(many(63, "").is_ok());
    let error = many(64, "").unwrap_err();
    assert_eq!(error, "0.toml: environment: more than 63 variables");
    let error = many(16, &"x".repeat(1024)).unwrap_err();
    assert_eq!(error, "0.toml: environment: the variables are longer than 16384 bytes together");
}

const MANUAL: &str = include_str!("../../../docs/man/gpusession.toml.5");

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

#[test]
fn the_manual_comes_from_the_rows() {
    let text = [
        ".SH KEYS\n".into(),
        manual(Keys::ROWS),
        manual_table("[client]", Client::ABOUT, Client::ROWS),
        manual_table("[access]", Access::ABOUT, Access::ROWS),
        manual_table("[[lease]]", LeaseConfig::ABOUT, LeaseConfig::ROWS),
        manual_table("[transport]", Transport::ABOUT, Transport::ROWS),
    ]
    .concat();
    up_to_date(&file("docs/man/gpusession.toml.5"), ".SH KEYS", ".SS [environment]", &text).unwrap();
}

#[test]
fn the_shipped_file_comes_from_the_rows() {
    let text = [
        "# ---- Keys\n\n".into(),
        sample(Keys::ROWS),
        sample_table("[client]", Client::ABOUT, Client::ROWS),
        sample_table("[access]", Access::ABOUT, Access::ROWS),
        sample_table("[transport]", Transport::ABOUT, Transport::ROWS),
        sample_table("[[lease]]", LeaseConfig::ABOUT, LeaseConfig::ROWS),
        "\n".into(),
    ]
    .concat();
    let path = file("packaging/etc/gpusession.toml");
    up_to_date(&path, "# ---- Keys", "# ---- Examples", &text).unwrap();
    let written = uncommented(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (shipped, without) = (load(&[&written]).unwrap(), load(&[]).unwrap());
    assert_eq!((&shipped.keys, &shipped.access), (&without.keys, &without.access));
    assert_eq!(shipped.transport, without.transport);
    for row in LeaseConfig::ROWS {
        assert!(written.contains(&format!("\n{} = {}\n", row.key(), row.value)), "{}", row.name);
    }
}

#[test]
fn each_key_has_a_consumer() {
    // `Spec::configured` takes a lease apart, so that the compiler notices a key without consumer.
    let rows = [Keys::ROWS, Client::ROWS, Access::ROWS].concat();
    let unread = unread(&file("gpusessiond/src"), &rows).unwrap();
    assert!(unread.is_empty(), "no code reads {unread:?}");
}

#[test]
fn variables_that_the_manual_refuses_are_refused() {
    let (_, refused) = MANUAL.split_once("Refused are").unwrap();
    let (refused, _) = refused.split_once("All others").unwrap();
    let variable = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_' || c == '*';
    let names: Vec<_> = refused.split(|c| !variable(c)).filter(|word| word.len() > 1).collect();
    assert!(names.len() > 40);
    for name in names {
        assert!(variables::check(&name.replace('*', "X"), "").is_err(), "{name}");
    }
}

#[test]
fn parts_of_the_multiprocessors() {
    let read = |line: &str| load(&[&format!("[[lease]]\n{line}\n")]).map(|mut c| c.leases.remove(0));
    let lease = |line: &str| read(line).unwrap();
    assert_eq!(lease("").sm_percent, SmPercent::Percent(100));
    assert_eq!(lease("sm_percent = 25").sm_percent, SmPercent::Percent(25));
    assert_eq!(lease("sm_percent = \"auto\"").sm_percent, SmPercent::Auto);
    assert_eq!(lease("sm_count = 32").sm_count, Some(32));
    for (line, why) in [("sm_percent = 0", "between 1 and 100"), ("sm_percent = \"some\"", "\"auto\"")] {
        let error = read(line).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn servers_file_round_trips() {
    let servers = Servers { servers: vec![ServerEntry { address: "gpu1:7601".into() }] };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("servers.toml");
    assert_eq!(Servers::load(&path).unwrap(), None);
    std::fs::write(&path, servers.to_text()).unwrap();
    assert_eq!(Servers::load(&path).unwrap(), Some(servers));
    std::fs::write(&path, "[[server]]\naddress = \"gpu2\"\n").unwrap();
    assert_eq!(Servers::load(&path).unwrap().unwrap().addresses(), ["gpu2:7601"]);
}

#[test]
fn several_gpus_of_a_lease_bring_the_variables_that_nccl_needs() {
    let level = |text: &str| load(&[text]).unwrap().environment.get("NCCL_P2P_LEVEL").cloned();
    assert_eq!(level("[[lease]]\n[[lease]]\ngpus = 1\n"), None);
    assert_eq!(level("[[lease]]\n[[lease]]\ngpus = 2\n").as_deref(), Some("SYS"));
    let own = "[[lease]]\ngpus = 2\n[environment]\nNCCL_P2P_LEVEL = \"PHB\"\n";
    assert_eq!(level(own).as_deref(), Some("PHB"));
    let several = load(&["[[lease]]\ngpus = 2\n"]).unwrap().environment;
    assert_eq!(several.get("NCCL_WORK_FIFO_BYTES").map(String::as_str), Some("65536"));
}
