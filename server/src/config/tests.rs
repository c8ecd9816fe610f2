//! Tests of the configuration, its errors, and the texts that document its keys.

mod texts;

use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::Sharing;

use super::*;
use crate::limits::{Bound, LIMITS, Scope, TOP_LEVEL};

/// A host without NVIDIA's driver, systemd and variables.
fn around() -> Surroundings<'static> {
    Surroundings {
        env: &|_| None,
        host_name: "h".into(),
        ephemeral: None,
        nvidia_driver: false,
        signer_unit: false,
        starter_unit: false,
    }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    let env = |name: &str| match name {
        "SITE" => Some("lab".to_string()),
        "STATE_DIRECTORY" => Some("/var/lib/gpuserver-a:/x".into()),
        _ => None,
    };
    let around = Surroundings {
        env: &env,
        host_name: "Gpu1.example.org".into(),
        ephemeral: Some((32768, 60999)),
        ..around()
    };
    from_text(Path::new("t.toml"), text, &around)
}

fn message(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn a_server_of_the_host_has_the_signer_and_the_starter_of_its_instance() {
    let around = Surroundings { signer_unit: true, starter_unit: true, ..around() };
    let sockets = |file: &str| {
        from_text(Path::new(file), "", &around).map(|config| [config.keys.signer, config.keys.starter])
    };
    for (file, expected) in [
        (
            "/etc/gpusession/gpuserver.toml",
            ["/run/gpuserver-ca/sign.sock", "/run/gpuserver-worker/start.sock"].map(Some),
        ),
        (
            "/etc/gpusession/gpuserver-a.toml",
            ["/run/gpuserver-ca-a/sign.sock", "/run/gpuserver-worker-a/start.sock"].map(Some),
        ),
        ("/home/alice/gpuserver.toml", [None; 2]),
    ] {
        assert_eq!(sockets(file).unwrap(), expected.map(|socket| socket.map(Into::into)), "{file}");
    }
    for (taken, by) in [("ca", "signer"), ("ca-a", "signer"), ("worker", "starter"), ("worker-a", "starter")]
    {
        let taken = format!("/etc/gpusession/gpuserver-{taken}.toml");
        let refused = sockets(&taken).unwrap_err().to_string();
        assert!(refused.contains(by) && refused.contains(&taken), "{refused}");
    }
}

#[test]
fn an_instance_has_folders_of_its_own() {
    let around = around();
    for (file, state, runtime) in [
        ("/etc/gpusession/gpuserver.toml", "/var/lib/gpuserver", "/run/gpuserver"),
        ("/etc/gpusession/gpuserver-a.toml", "/var/lib/gpuserver-a", "/run/gpuserver-a"),
        ("/etc/gpusession/gpuserver-cab.toml", "/var/lib/gpuserver-cab", "/run/gpuserver-cab"),
        ("/tmp/gpuserver-.toml", "/var/lib/gpuserver", "/run/gpuserver"),
        ("/tmp/gpuservers.toml", "/var/lib/gpuserver", "/run/gpuserver"),
    ] {
        let file = Path::new(file);
        let config = from_text(file, "", &around).unwrap();
        assert_eq!(
            (config.state_dir.as_path(), config.runtime_dir.as_path()),
            (Path::new(state), Path::new(runtime))
        );
        assert_eq!(admin_socket_beside(file, &|_| None), Path::new(runtime).join("admin.sock"));
    }
}

#[test]
fn defaults() {
    let config = parse("").unwrap();
    assert_eq!(config.name, "gpu1");
    assert_eq!(config.listen.to_string(), "[::]:7601");
    assert_eq!(config.data_ports, (7602, 7602));
    assert_eq!(config.state_dir, Path::new("/var/lib/gpuserver-a"));
    assert_eq!(config.origin("state_dir"), Origin::Environment("STATE_DIRECTORY"));
    assert_eq!(config.report.len(), keys().count() + LIMITS.len() - TOP_LEVEL.len());
    for name in TOP_LEVEL {
        let key = keys().find(|k| k.name == name).unwrap();
        let limit = LIMITS.iter().find(|l| l.name == name).unwrap();
        assert_eq!(key.default(), Some(limit.default()), "{name}: one default");
    }
    assert!(config.encryption && config.warnings.is_empty());
}

#[test]
fn values() {
    let config = parse(
        "name = \"${SITE}-1\"\nlisten = \"127.0.0.1:0\"\nadvertise = [\"gpu1.${SITE}:17601\", \"[fd00::1]:7\"]\n\
         data_ports = \"45201-46225\"\ngpus = [0, \"gpu-ABC\"]\nencryption = \"off\"\n\
         trusted_networks = [\"10.0.0.0/8\", \"fd00::/8\"]\nworker_idle_exit = \"1h 30min\"\nwarm_workers = 0\n",
    )
    .unwrap();
    assert_eq!(config.name, "lab-1");
    assert_eq!(config.advertise[0], Advertised { host: "gpu1.lab".into(), port: Some(17601) });
    assert_eq!(config.advertise[1], Advertised { host: "fd00::1".into(), port: Some(7) });
    assert_eq!(config.gpus, Gpus::These(vec![GpuChoice::Index(0), GpuChoice::Uuid("GPU-abc".into())]));
    assert_eq!(config.worker_idle_exit, Duration::from_secs(5400));
    assert!(config.may_be_clear("::ffff:10.2.3.4".parse().unwrap()));
    assert!(!config.may_be_clear("127.0.0.1".parse().unwrap()), "which a forwarded port looks like, too");
    assert!(!config.may_be_clear("192.0.2.1".parse().unwrap()));
    assert!(config.warnings[0].contains("45201"), "{:?}", config.warnings);
    assert!(!parse("trusted_networks = [\"10.0.0.0/8\"]").unwrap().may_be_clear("10.0.0.1".parse().unwrap()));
}

#[test]
fn errors_name_file_line_key_and_remedy() {
    assert_eq!(message("\n\nlitsen = \"x\""), "t.toml:3: unknown key `litsen`; did you mean `listen`?");
    let names: Vec<_> = keys().map(|key| key.name).collect();
    assert!(message("quux_zzzz = 1").contains(&format!("the keys are {}, reserve", names.join(", "))));
    assert!(message("name = \"a\"\nname = \"b\"").starts_with("t.toml:2: "));
    assert!(message("listen = ").starts_with("t.toml:1: "));
    assert!(message("gpus = []").contains("no GPU would be served"));
    assert!(message("gpus = \"0\"").contains("[0]"));
    assert!(message("gpus = [-1]").contains("-1"));
    assert!(message("gpus = [0, 0]").contains("twice"));
    assert!(message("registry = \"etcd\"").contains("does not support it yet"));
    assert!(message("sharing = \"often\"").contains("only \"time-slice\" or \"mps\" or \"exclusive\""));
    assert!(message("warm_workers = 65").contains("0 to 64"));
    assert!(message("driver = \"libcuda.so.1\"").contains("absolute"));
    assert!(message("trusted_networks = [\"10.0.0.0/99\"]").contains("not a network"));
    assert!(message("metrics_listen = \"7603\"").contains("127.0.0.1:7603"));
    assert!(parse("metrics_listen = \"0.0.0.0:7603\"").unwrap().warnings[0].contains("Prometheus"));
    assert!(message("data_ports = \"9-8\"").contains("ends before"));
    assert_eq!(message("\nname = \"${NOPE}\""), "t.toml:2: name: environment variable NOPE is not set");
    assert!(
        message("[limits.user.a]\nmodels = [\"${SITE}\", \"${NOPE}\"]")
            .starts_with("t.toml:2: limits.user.a.models: environment variable NOPE")
    );
    assert!(message("name = \"a b\"").contains("t.toml:1: name = \"a b\": "));
    assert!(
        message("[limits]\ngpu = 1")
            .contains("t.toml:2: unknown key `limits.gpu`; did you mean `limits.gpus`?")
    );
    assert!(message("[limits.machine.x]\ngpus = 1").contains("unknown key `limits.machine.x.gpus`"));
    assert!(message("[limits.user.a]\non_idle = [\"burn\"]").contains("\"burn\" is none of park, release"));
    assert!(message("[limits.user.a]\npark_after = \"soon\"").contains("a duration like"));
    assert!(message("[limits]\ngpus = \"x\"").contains("t.toml:2: limits.gpus = \"x\": a whole number"));
    assert!(message("[limits]\nstaging = \"4MB\"").contains("MiB"));
    assert!(message("[limits]\nsm_percent = 0").contains("from 1 to 100"));
    assert!(
        message("[limits.group.f]\nusers = [\"bob\"]\n[limits.group.g]\ngpus = 1")
            .starts_with("t.toml:4: limits.group.g has no members")
    );
    assert!(message("[limits.group.g]\n\nusers = []").starts_with("t.toml:3: limits.group.g has no"));
    assert!(message("[users]\nscope = \"x\"").contains("users.scope"));
    assert!(message("[[reserve]]\ngpus = 1").contains("client is missing"));
    assert!(message("[[reserve]]\nclient = \"a\"\ngpu = 1").contains("the keys of [[reserve]]"));
    let reserve = |field: &str| message(&format!("[[reserve]]\nclient = \"a\"\n{field}"));
    assert_eq!(reserve("gpus = \"x\""), "t.toml:3: reserve.gpus = \"x\": a number of GPUs is wanted");
    assert!(
        reserve("memory = \"4GB\"")
            .starts_with("t.toml:3: reserve.memory = \"4GB\": `4GB` is not a size: write GiB")
    );
    assert!(reserve("memory = true").starts_with("t.toml:3: reserve.memory = true: `true` is not a size"));
    assert_eq!(
        reserve("memory = \"${NOPE}\""),
        "t.toml:3: reserve.memory: environment variable NOPE is not set"
    );
    let bytes = parse("[[reserve]]\nclient = \"a\"\nmemory = 1073741824").unwrap();
    assert_eq!(bytes.rules.reserve[0].memory, Memory::Bytes(1 << 30), "as limits.memory has it");
    assert!(message("overcommit = \"50%\"").contains("100%"));
}

#[test]
fn a_value_of_a_wrong_type_gets_an_error_with_the_right_one() {
    for (text, said) in [
        ("cache_max = 1.5", "t.toml:1: cache_max = 1.5: a size like"),
        ("park_after = 1979-05-27", "t.toml:1: park_after = 1979-05-27: a duration like"),
        ("warm_workers = 99999999999999999999", "warm_workers = 99999999999999999999: a number from 0 to 64"),
        ("name = { a = 1 }", "t.toml:1: name = {...}: a string is wanted, in quotes"),
        ("advertise = [1.5]", "advertise = [1.5]: a string is wanted"),
        ("gpus = [0.5]", "gpus = [0.5]: 0.5 is neither an index nor a UUID"),
        ("limits.gpus = 1.5", "t.toml:1: limits.gpus = 1.5: a whole number is wanted"),
        ("limits.memory = 1e9", "limits.memory = 1e9: `1e9` is not a size"),
        ("limits.lease_ttl = 1.5", "limits.lease_ttl = 1.5: a duration like"),
        ("limits.models = 1.5", "limits.models = 1.5: a list of strings is wanted"),
        ("[limits.user.a.gpus]\nx = 1", "limits.user.a.gpus = {...}: a whole number is wanted"),
        ("[[reserve]]\nclient = \"a\"\ngpus = 1.5", "t.toml:3: reserve.gpus = 1.5: a number of GPUs"),
    ] {
        assert!(message(text).contains(said), "{text}: {}", message(text));
    }
}

#[test]
fn an_unknown_key_says_what_to_write() {
    for (text, said) in [
        ("[reserve]\nclient = \"a\"", "t.toml:1: `reserve`: write it as [[reserve]]"),
        ("reserve = 3", "write it as [[reserve]]"),
        ("users = \"site\"", "`users` is a table: write [users] with scope"),
        (
            "gpu_sharing = [0]",
            "t.toml:1: `gpu_sharing` is a table: write [gpu_sharing] with time-slice, mps, exclusive",
        ),
        ("limits = 3", "`limits` is a table: write [limits]"),
        ("limits.user = 3", "`limits.user`: the name of the user is missing: write [limits.user.NAME]"),
        (
            "[limits.user]\ngpus = 5",
            "t.toml:2: `limits.user.gpus`: the name of the user is missing: write [limits.user.NAME]",
        ),
        ("[limits.group]\nusers = []", "[limits.group.NAME]"),
        ("[limits.client]\ngpus = 5", "[limits.client.NAME]"),
        (
            "[limits.client.vm.7]\ngpus = 5",
            "`limits.client.vm.7`: write a name with a dot in quotes: [limits.client.\"vm.7\"]",
        ),
        (
            "[limits]\npark_after = \"1h\"",
            "t.toml:2: unknown key `limits.park_after`; did you mean `park_after`?",
        ),
        (
            "[limits.group.g]\ngpu = 1",
            "unknown key `limits.group.g.gpu`; did you mean `limits.group.g.gpus`?",
        ),
        ("[limits.group.g]\nuser = []", "did you mean `limits.group.g.users`?"),
        (
            "[limits.group.g]\nencryption = 1",
            "`limits.group.g.encryption`; the keys of this table are clients, users, gpus, ",
        ),
        (
            "[limits.client.a]\nencryption = 1",
            "`limits.client.a.encryption`; the keys of this table are gpus, ",
        ),
        ("[limits]\nname = \"a\"", "unknown key `limits.name`; the keys of this table are gpus, "),
        ("[limits.machine.x]\ngpus = 1", "unknown key `limits.machine.x.gpus`; limits are in [limits], "),
        ("requests_per_s = 3", "did you mean `limits.requests_per_s`?"),
        ("[users]\nlisten = 1", "unknown key `users.listen`; did you mean `listen`?"),
    ] {
        assert!(message(text).contains(said), "{text}: {}", message(text));
    }
}

#[test]
fn no_port_is_two_listeners() {
    for (text, said) in [
        (
            "data_ports = 7601",
            "t.toml:1: data_ports = 7601: port 7601 is also the port of listen; change one of them",
        ),
        (
            "listen = \"[::]:7602\"",
            "t.toml:1: listen = \"[::]:7602\": port 7602 is also the port of data_ports;",
        ),
        (
            "metrics_listen = \"127.0.0.1:7601\"",
            "metrics_listen = \"127.0.0.1:7601\": port 7601 is also the port of listen",
        ),
        (
            "\nmetrics_listen = \"[::1]:7602\"",
            "t.toml:2: metrics_listen = \"[::1]:7602\": port 7602 is also the port of data_ports",
        ),
        (
            "listen = \"10.0.0.1:1\"\nmetrics_listen = \"0.0.0.0:1\"",
            "t.toml:2: metrics_listen = \"0.0.0.0:1\": port 1",
        ),
    ] {
        assert!(message(text).contains(said), "{text}: {}", message(text));
    }
    for text in [
        "data_ports = \"7601-7602\"",
        "listen = \"127.0.0.1:0\"\ndata_ports = 0\nmetrics_listen = \"127.0.0.1:0\"",
        "listen = \"10.0.0.1:7601\"\nmetrics_listen = \"127.0.0.1:7601\"",
        "listen = \"0.0.0.0:7601\"\nmetrics_listen = \"[::1]:7601\"",
    ] {
        parse(text).expect(text);
    }
}

#[test]
fn each_gpu_is_shared_as_the_configuration_says() {
    let config =
        parse("sharing = \"exclusive\"\n[gpu_sharing]\nmps = [1, \"gpu-ABC\"]\ntime-slice = [0]").unwrap();
    let uuid = GpuChoice::Uuid("GPU-abc".into());
    assert_eq!(config.sharing, Sharing::Exclusive);
    assert_eq!(
        config.gpu_sharing,
        [
            (GpuChoice::Index(0), Sharing::TimeSlice),
            (GpuChoice::Index(1), Sharing::Mps),
            (uuid, Sharing::Mps)
        ]
    );
    assert_eq!(config.mps.map(|mps| mps.key), Some("gpu_sharing.mps"));
    let key = |text: &str| parse(text).unwrap().mps.map(|mps| mps.key);
    assert_eq!(key("sharing = \"mps\"\ngpu_sharing.exclusive = [0]"), Some("sharing"));
    assert_eq!(key("gpu_sharing.mps = [0]\nmps_control = \"/x\""), Some("mps_control"));
    assert_eq!(key("gpu_sharing.exclusive = [0]\ngpu_sharing.mps = []"), None);
    let warned = |text: &str| parse(text).unwrap().warnings.join("\n");
    assert!(
        warned("mps_domain = \"server\"\ngpu_sharing.exclusive = [0]").contains("have no effect without")
    );
    let said = warned("mps_domain = \"server\"\ngpu_sharing.mps = [0]");
    assert!(said.contains("cannot park") && !said.contains("have no effect"), "{said}");
    assert_eq!(
        message("[gpu_sharing]\nmps = [0]\nexclusive = [1, 0]"),
        "t.toml:3: gpu_sharing.exclusive = [1, 0]: gpu_sharing.mps names 0 already; name it once"
    );
    assert!(message("gpu_sharing.mps = [\"GPU-a\", \"gpu-A\"]").contains("GPU-a is listed twice"));
    assert!(message("gpu_sharing.mps = \"all\"").contains("gpu_sharing.mps = \"all\": a list of"));
    assert!(message("gpu_sharing.mps = [\"0\"]").contains("neither an index nor a UUID"));
    assert!(message("[gpu_sharing]\nmsp = [0]").contains("did you mean `gpu_sharing.mps`?"));
}

#[test]
fn drop_ins_win_in_the_order_of_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpuserver-a.toml");
    let around = Surroundings { nvidia_driver: true, ..around() };
    let said = load(&file, true, &around).unwrap_err().to_string();
    assert!(said.starts_with(&format!("{}: cannot be read: ", file.display())), "{said}");
    assert!(said.ends_with("create it, or name another file with -c"), "{said}");
    let without = load(&file, false, &around).unwrap();
    assert!(without.warnings[0].contains("not found: all keys") && !without.file_found);
    std::fs::write(&file, "name = \"a\"\nwarm_workers = 1").unwrap();
    std::fs::create_dir(folder.path().join("gpuserver-a.d")).unwrap();
    let drop_in = |name: &str, text: &str| {
        std::fs::write(folder.path().join("gpuserver-a.d").join(name), text).unwrap();
    };
    drop_in("90-runtime.toml", "\nwarm_workers = 9");
    drop_in("10-site.toml", "warm_workers = 3\nencryption = \"off\"");
    drop_in("20-note.txt", "not a configuration");
    let config = load(&file, true, &around).unwrap();
    assert_eq!((config.name.as_str(), config.warm_workers, config.encryption), ("a", 9, false));
    assert!(config.file_found);
    assert!(config.origin("warm_workers").to_string().ends_with("gpuserver-a.d/90-runtime.toml:2"));
    drop_in("50-bad.toml", "warm = 1");
    assert!(load(&file, true, &around).unwrap_err().to_string().contains("50-bad.toml:1: unknown key"));
    // An unreadable folder of drop-ins is an error, and the socket is found nevertheless.
    std::fs::remove_dir_all(folder.path().join("gpuserver-a.d")).unwrap();
    std::fs::write(folder.path().join("gpuserver-a.d"), "").unwrap();
    let said = load(&file, true, &around).unwrap_err().to_string();
    assert!(said.contains("gpuserver-a.d") && said.contains("drop-ins cannot be read"), "{said}");
    std::fs::write(&file, "runtime_dir = \"/run/x\"").unwrap();
    assert_eq!(admin_socket_beside(&file, &|_| None), Path::new("/run/x/admin.sock"));
}

#[test]
fn limits_of_every_layer() {
    let config = parse(
        "overcommit = \"150%\"\npark_after = \"10min\"\n[users]\nscope = \"site\"\n[limits]\ngpus = 4\nmemory = \"50%\"\n\
         [limits.group.lab]\nclients = [\"vm-*\"]\nusers = [\"bob\"]\nstaging = \"1GiB\"\n\
         park_after = \"2h\"\n[limits.client.\"a.b\"]\nmodels = [\"H200\", \"T4\"]\nlease_ttl = 0\n[limits.user.alice]\ngpus = 1\n\
         park_after = \"1min\"\n[[reserve]]\nclient = \"vm-1\"\nmemory = \"25%\"\n",
    )
    .unwrap();
    assert_eq!(config.limits.scope, Scope::Site);
    let idle = |client, user| config.limits.of(client, user).idle();
    assert_eq!(idle("vm-1", "").park, Duration::from_secs(7200), "its group's");
    assert_eq!(idle("vm-1", "alice").park, Duration::from_secs(60), "the smallest");
    assert_eq!(idle("db", "").park, Duration::from_secs(600), "everybody's");
    assert_eq!(config.origin("limits.user.alice.park_after").to_string(), "t.toml:18");
    assert_eq!(config.limits.of("vm-1", "alice").smallest("gpus").unwrap().1, 1);
    assert_eq!(config.limits.of("vm-1", "").smallest("staging").unwrap().1, 1 << 30);
    assert!(config.limits.of("a.b", "").smallest("lease_ttl").is_none());
    assert!(config.limits.of("a.b", "").not_listed("models", |m| m == "H200").is_none());
    assert_eq!(config.origin("limits.client.\"a.b\".lease_ttl").to_string(), "t.toml:15");
    assert_eq!(config.rules.reserve[0].gpus, 1);
    assert_eq!(config.rules.overcommit_percent, 150);
    assert!(config.warnings.iter().any(|w| w.contains("overcommit")));
    assert!(!config.warnings.iter().any(|w| w.contains("no effect")), "{:?}", config.warnings);
}

#[test]
fn limits_without_effect_are_named() {
    let warnings = |text: &str| -> Vec<String> {
        parse(text).unwrap().warnings.into_iter().filter(|w| w.contains("no effect")).collect()
    };
    let alice = warnings("[limits.user.alice]\ngpus = 9\nworkers = 8\npark_after = 0\nstaging = \"1MiB\"\n");
    assert_eq!(alice.len(), 2, "{alice:?}");
    assert!(alice[0].starts_with("gpus = 9 of user alice (t.toml:2) has no effect: "), "{alice:?}");
    assert!(alice[1].starts_with("park_after = "), "{alice:?}");
    assert_eq!(warnings("[users]\nscope = \"site\"\n[limits.user.alice]\ngpus = 9\n").len(), 0);
    // A client with a higher limit gives the user's limit an effect.
    assert!(warnings("[limits.client.a]\ngpus = 9\n[limits.user.alice]\ngpus = 9\n").is_empty());
    let group = "[limits.group.lab]\nusers = [\"bob\"]\ngpus = 2\n";
    assert_eq!(warnings(group).len(), 1);
    assert!(warnings(&group.replace("users", "clients")).is_empty());
}

#[test]
fn a_user_has_no_rate() {
    let said = parse("[limits.user.bob]\nrequests_per_s = 3\n").unwrap_err().to_string();
    assert!(
        said.contains("t.toml:2: `limits.user.bob.requests_per_s`: a request does not name its user"),
        "{said}"
    );
}

#[test]
fn live_keys_follow_the_files_and_the_others_stay() {
    let old = parse("").unwrap();
    let text = "name = \"other\"\nwarm_workers = 7\novercommit = \"150%\"\nusers.scope = \"site\"\n\
                limits.gpus = 9\n[[reserve]]\nclient = \"a\"\n";
    let fresh = parse(text).unwrap();
    let config = old.with_live_of(fresh.clone());
    assert_eq!((config.name.as_str(), config.warm_workers), ("gpu1", 7));
    assert_eq!((config.users.scope, config.limits.scope), (Scope::Site, Scope::Site));
    assert_eq!(config.rules, fresh.rules);
    assert_eq!(config.limits.of("", "").smallest("gpus").unwrap().1, 9);
    assert_eq!(config.waiting.iter().map(|(key, ..)| key.as_str()).collect::<Vec<_>>(), ["name"]);
    // Each key has one line of the report, from the file if it is live.
    for row in keys() {
        let lines: Vec<_> = config.report.iter().filter(|(key, ..)| key == row.name).collect();
        let of = if row.live { &fresh } else { &old };
        assert_eq!(lines.len(), 1, "{}", row.name);
        assert!(of.report.contains(lines[0]), "{}", row.name);
    }
}

#[test]
fn values_are_set_and_taken_back() {
    let text = edit_runtime("", "limits.client.\"vm.1\".gpus", Some("3")).unwrap();
    let text = edit_runtime(&text, "warm_workers", Some("5")).unwrap();
    let text = edit_runtime(&text, "limits.memory", Some("50%")).unwrap();
    let text = edit_runtime(&text, "limits.models", Some("[\"H200\"]")).unwrap();
    let config = parse(&text).unwrap();
    assert_eq!(config.warm_workers, 5);
    assert_eq!(config.limits.of("vm.1", "").smallest("gpus").unwrap().1, 3);
    let text = edit_runtime(&text, "warm_workers", None).unwrap();
    assert_eq!(parse(&text).unwrap().warm_workers, 2);
    assert!(edit_runtime(&text, "a b", Some("1")).is_err());
    // A key that is one of several lines, or brings a value of its own, changes no other key.
    for key in
        ["limits.gpus = 0\nisolation", "isolation = 1\nlimits.gpus", "isolation = 1 #", "[limits]\ngpus", ""]
    {
        assert!(edit_runtime(&text, key, Some("\"off\"")).is_err(), "{key:?}");
        assert!(key_parts(key).is_err(), "{key:?}");
    }
    assert_eq!(key_parts("limits.client.\"vm.1\".gpus").unwrap(), ["limits", "client", "vm.1", "gpus"]);
    assert!(edit_runtime(&text, "limits.memory.x", Some("1")).unwrap_err().contains("not a table"));
}

#[test]
fn variables() {
    let env = |n: &str| (n == "A").then(|| "1".to_string());
    assert_eq!(expand("x${A}y$${A}z", &env), Ok("x1y${A}z".into()));
    assert!(expand("${A", &env).is_err());
}
