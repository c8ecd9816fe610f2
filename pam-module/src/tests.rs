#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use gpusession_login::{MAX_REPLY, Malformed, check};
use proptest::prelude::*;

use super::*;

/// A login without PAM.
#[derive(Default)]
struct Login {
    service: &'static str,
    user: Option<&'static str>,
    uid: Option<u32>,
    process: BTreeMap<String, String>,
    list: BTreeMap<String, String>,
}

impl Pam for Login {
    fn service(&self) -> Option<String> {
        Some(self.service.into())
    }
    fn user(&self) -> Option<String> {
        self.user.map(str::to_owned)
    }
    fn tty(&self) -> Option<String> {
        None
    }
    fn rhost(&self) -> Option<String> {
        None
    }
    fn uid_of(&self, _user: &str) -> Option<u32> {
        self.uid
    }
    fn is_set(&self, name: &str, value: &str) -> bool {
        self.in_list(name) || self.process.get(name).is_some_and(|set| set != value)
    }
    fn in_list(&self, name: &str) -> bool {
        self.list.contains_key(name)
    }
    fn put(&mut self, name: &str, value: &str) -> bool {
        self.list.insert(name.into(), value.into());
        true
    }
}

fn alice() -> Login {
    Login { service: "sshd", user: Some("alice"), uid: Some(1000), ..Login::default() }
}

fn at(folder: &Path) -> Options {
    // The timeout is long, since the test's daemon is a thread on a perhaps busy machine.
    Options { socket: folder.join("pam.sock"), timeout: Duration::from_secs(5), ..Options::default() }
}

/// Starts a daemon that answers one login with this packet.
fn daemon(folder: &Path, answer: Vec<u8>) -> std::thread::JoinHandle<Vec<u8>> {
    use std::os::fd::FromRawFd as _;
    use std::os::unix::ffi::OsStrExt as _;
    let path = folder.join("pam.sock");
    // SAFETY: plain system calls on memory that lives here; the descriptors are ours.
    let listener = unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
            *to = *from as libc::c_char;
        }
        let length = std::mem::size_of::<libc::sockaddr_un>() as u32;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), length), 0);
        assert_eq!(libc::listen(fd, 1), 0);
        std::os::unix::net::UnixListener::from_raw_fd(fd)
    };
    std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = vec![0; 4096];
        let n = stream.read(&mut request).unwrap();
        let _ = stream.write_all(&answer);
        request.truncate(n);
        request
    })
}

/// Runs a login that the daemon answers with `answer`.
fn login(login: &mut Login, answer: Vec<u8>) -> Result<bool, Trouble> {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(folder.path(), answer);
    let result = open(login, &at(folder.path()));
    assert!(matches!(Request::parse(&daemon.join().unwrap()), Ok(Request::Open(o)) if o.uid == 1000));
    result
}

fn answer(environment: &[(&str, &str)]) -> Vec<u8> {
    Reply { environment: environment.to_vec() }.encode().unwrap()
}

#[test]
fn a_session_gets_what_the_user_has_not_set() {
    let mut session = alice();
    session.process.insert("NCCL_DEBUG".into(), "INFO".into());
    session.process.insert("GPUSESSION_ID".into(), "outer".into());
    // `su -l` would drop this variable.
    session.process.insert("XLA_FLAGS".into(), "x".into());
    session.list.insert("OMP_NUM_THREADS".into(), "2".into());
    let environment = [
        ("GPUSESSION_ID", "inner"),
        ("NCCL_DEBUG", "WARN"),
        ("OMP_NUM_THREADS", "8"),
        ("TF_X", "1"),
        ("XLA_FLAGS", "x"),
        ("http_proxy", "http://proxy:3128"),
    ];
    assert_eq!(login(&mut session, answer(&environment)), Ok(true));
    let set: Vec<_> = session.list.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(
        set,
        [
            ("GPUSESSION_ID", "inner"),
            ("OMP_NUM_THREADS", "2"),
            ("TF_X", "1"),
            ("XLA_FLAGS", "x"),
            ("http_proxy", "http://proxy:3128")
        ]
    );
    let mut nobody = alice();
    assert_eq!(login(&mut nobody, answer(&[])), Ok(false));
    assert!(nobody.list.is_empty());
}

#[test]
fn an_answer_with_one_forbidden_variable_is_rejected() {
    let good = answer(&[("GPUSESSION_ID", "inner"), ("ABCDEFGHIJ", "x")]);
    for name in [
        &b"LD_PRELOAD"[..],
        b"SSH_CLIENT",
        b"CDPATH\0\0\0\0",
        b"A=B\nC=D\nE=",
        b"1BCDEFGHIJ",
        b"ABCDEFGHI\xff",
    ] {
        let at = good.windows(10).position(|window| window == b"ABCDEFGHIJ").unwrap();
        let mut evil = good.clone();
        evil[at..at + 10].copy_from_slice(name);
        let mut session = alice();
        assert!(login(&mut session, evil).is_err(), "{}", String::from_utf8_lossy(name));
        assert!(session.list.is_empty());
    }
}

#[test]
fn system_logins_do_not_contact_the_daemon() {
    let options = at(Path::new("/nonexistent"));
    for mut login in [
        Login { uid: Some(999), ..alice() },
        Login { service: "systemd-user", ..alice() },
        Login { service: "gdm-launch-environment", ..alice() },
    ] {
        assert_eq!(open(&mut login, &options), Ok(false));
    }
    assert!(open(&mut Login { uid: None, ..alice() }, &options).is_err());
    assert!(open(&mut Login { user: None, ..alice() }, &options).is_err());
    // A login session that was not opened is not closed.
    assert_eq!(close(&alice(), &options), Ok(false));
}

#[test]
fn variables_that_the_options_do_not_allow_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("GPUSESSION_ID", "inner"), ("NCCL_DEBUG", "WARN"), ("PYTHONPATH", "x")];
    let daemon = daemon(folder.path(), answer(&environment));
    let mut login = alice();
    let options = Options { allow: vec!["NCCL_*".into()], ..at(folder.path()) };
    assert_eq!(open(&mut login, &options), Ok(true));
    daemon.join().unwrap();
    assert_eq!(login.list.keys().collect::<Vec<_>>(), ["GPUSESSION_ID", "NCCL_DEBUG"]);
}

#[test]
fn options_are_read_leniently() {
    let read = Options::parse([
        "timeout_ms=200",
        "min_uid=0",
        "skip_services=a,b",
        "allow=NCCL_*,OMP_NUM_THREADS",
        "debug",
        "socket=/a/b",
        "socket=c",
        "what=1",
        "x",
    ]);
    assert_eq!(read.timeout, Duration::from_millis(200));
    assert_eq!((read.min_uid, read.debug), (0, true));
    assert_eq!(read.socket, Path::new("/a/b"));
    assert!(read.skips("b") && !read.skips("systemd-user"));
    assert!(["NCCL_DEBUG", "OMP_NUM_THREADS", "GPUSESSION_ID"].iter().all(|name| read.allows(name)));
    assert!(!["NCCL", "OMP_NUM_THREADS_", "PYTHONPATH"].iter().any(|name| read.allows(name)));
    assert_eq!(Options::parse(["timeout_ms=x", "min_uid=-1", "timeout_ms=0"]), Options::default());
    assert_eq!(Options::parse(["timeout_ms=999999"]).timeout, Duration::from_secs(5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Any bytes as an answer yield an error, or variables that may be set.
    #[test]
    fn no_answer_does_harm(mut bytes in prop::collection::vec(any::<u8>(), 0..600), begins in 0..4) {
        let head: &[u8] = match begins {
            0 => b"",
            1 => b"gpsL",
            2 => b"gpsL\x01\0",
            _ => b"gpsL\x01\0\x01\0\x0d\0",
        };
        bytes.splice(0..0, head.iter().copied());
        match Reply::parse(&bytes) {
            Ok(reply) => prop_assert!(reply.environment.iter().all(|(n, v)| check(n, v).is_ok())),
            Err(Malformed(why)) => prop_assert!(!why.is_empty()),
        }
    }

    /// Answers with a few changed bytes yield an error, or variables that may be set.
    #[test]
    fn damaged_answers_do_no_harm(
        values in prop::collection::vec("[ !#%-&(-\\[\\]-_a-~]{0,40}", 1..8),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let names: Vec<String> = (0..values.len()).map(|i| format!("CUDA_X{i}")).collect();
        let environment = names.iter().map(String::as_str).zip(values.iter().map(String::as_str)).collect();
        let mut packet = Reply { environment }.encode().unwrap();
        for (at, byte) in damage {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        packet.truncate(cut.index(packet.len() + 1));
        if let Ok(reply) = Reply::parse(&packet) {
            prop_assert!(reply.environment.iter().all(|(n, v)| check(n, v).is_ok()));
            prop_assert!(packet.len() <= MAX_REPLY);
        }
    }
}
