#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use gpusession_login::{MAX_REPLY, Malformed};
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
    Options {
        socket: folder.join("pam.sock"),
        environment: folder.join("environment"),
        timeout: Duration::from_secs(5),
        ..Options::default()
    }
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

/// Runs a login that the daemon answers with `answer`; `file` writes root's file into the folder.
fn login(login: &mut Login, answer: Vec<u8>, file: impl FnOnce(&Path)) -> Result<bool, Trouble> {
    let folder = tempfile::tempdir().unwrap();
    file(&folder.path().join("environment"));
    let daemon = daemon(folder.path(), answer);
    let result = open(login, &at(folder.path()));
    assert!(matches!(Request::parse(&daemon.join().unwrap()), Ok(Request::Open(o)) if o.uid == 1000));
    result
}

fn answer(session: Option<&str>) -> Vec<u8> {
    Reply { session }.encode()
}

fn write(text: &'static str) -> impl FnOnce(&Path) {
    move |file| std::fs::write(file, text).unwrap()
}

#[test]
fn a_session_gets_what_the_user_has_not_set() {
    let mut session = alice();
    session.process.insert("NCCL_DEBUG".into(), "INFO".into());
    session.process.insert("GPUSESSION_ID".into(), "outer".into());
    // `su -l` would drop this variable.
    session.process.insert("XLA_FLAGS".into(), "x".into());
    session.list.insert("OMP_NUM_THREADS".into(), "2".into());
    let file = "NCCL_DEBUG=WARN\nOMP_NUM_THREADS=8\nTF_X=1\nXLA_FLAGS=x\nhttp_proxy=http://proxy:3128\n";
    assert_eq!(login(&mut session, answer(Some("inner")), write(file)), Ok(true));
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
    assert_eq!(login(&mut nobody, answer(None), write(file)), Ok(false));
    assert!(nobody.list.is_empty());
    let mut unfollowed = alice();
    assert_eq!(login(&mut unfollowed, answer(Some("")), write("TF_X=1\n")), Ok(true));
    assert_eq!(unfollowed.list.keys().collect::<Vec<_>>(), ["TF_X"]);
}

#[test]
fn a_daemon_that_was_taken_over_sets_no_variable() {
    let mut session = alice();
    let lie = b"gpsL\x01\0\x02\0\x0d\0\x05\0GPUSESSION_IDinner\x0a\0\x04\0PYTHONPATH/tmp";
    assert_eq!(login(&mut session, lie.to_vec(), |_| ()), Ok(true));
    assert_eq!(session.list.keys().collect::<Vec<_>>(), ["GPUSESSION_ID"]);
}

#[test]
fn only_a_file_of_root_or_this_user_sets_variables() {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
    fn mode(file: &Path, mode: u32) {
        std::fs::write(file, "TF_X=1\n").unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    type Wrong = fn(&Path);
    let mut wrong: Vec<(&str, Wrong)> = vec![
        ("writable by the group", |file| mode(file, 0o664)),
        ("writable by all", |file| mode(file, 0o646)),
        ("a link", |file| {
            mode(&file.with_extension("real"), 0o644);
            symlink(file.with_extension("real"), file).unwrap();
        }),
        ("a folder", |file| std::fs::create_dir(file).unwrap()),
        ("a pipe", |file| {
            let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
            // SAFETY: the path is a string that outlives the call.
            assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o644) }, 0);
        }),
        ("too long", |file| std::fs::write(file, "A=1\n".repeat(5000)).unwrap()),
        ("not text", |file| std::fs::write(file, b"TF_X=\xff\n").unwrap()),
        ("one bad line", |file| std::fs::write(file, "TF_X=1\nLD_PRELOAD=/x\n").unwrap()),
    ];
    // SAFETY: geteuid cannot fail and touches no memory.
    if unsafe { libc::geteuid() } == 0 {
        wrong.push(("another user's", |file| {
            mode(file, 0o644);
            chown(file, Some(12345), None).unwrap();
        }));
    }
    for (what, file) in wrong {
        let mut session = alice();
        assert!(login(&mut session, answer(Some("inner")), file).is_err(), "{what}");
        assert_eq!(session.list.keys().collect::<Vec<_>>(), ["GPUSESSION_ID"], "{what}");
    }
    let mut session = alice();
    assert_eq!(login(&mut session, answer(Some("inner")), |file| mode(file, 0o644)), Ok(true));
    assert_eq!(session.list.keys().collect::<Vec<_>>(), ["GPUSESSION_ID", "TF_X"]);
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
    std::fs::write(folder.path().join("environment"), "NCCL_DEBUG=WARN\nPYTHONPATH=x\n").unwrap();
    let daemon = daemon(folder.path(), answer(Some("inner")));
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
        "environment=/e",
        "what=1",
        "x",
    ]);
    assert_eq!(read.timeout, Duration::from_millis(200));
    assert_eq!((read.min_uid, read.debug), (0, true));
    assert_eq!((read.socket.as_path(), read.environment.as_path()), (Path::new("/a/b"), Path::new("/e")));
    assert!(read.skips("b") && !read.skips("systemd-user"));
    assert!(["NCCL_DEBUG", "OMP_NUM_THREADS"].iter().all(|name| read.allows(name)));
    assert!(!["NCCL", "OMP_NUM_THREADS_", "PYTHONPATH"].iter().any(|name| read.allows(name)));
    assert_eq!(Options::parse(["timeout_ms=x", "min_uid=-1", "timeout_ms=0"]), Options::default());
    assert_eq!(Options::parse(["timeout_ms=999999"]).timeout, Duration::from_secs(5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Any bytes as an answer yield an error, or an id of letters and digits.
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
            Ok(reply) => prop_assert!(harmless(reply)),
            Err(Malformed(why)) => prop_assert!(!why.is_empty()),
        }
    }

    /// Answers with a few changed bytes yield an error, or an id of letters and digits.
    #[test]
    fn damaged_answers_do_no_harm(
        id in "[a-z2-7]{0,70}",
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut packet = Reply { session: Some(&id) }.encode();
        for (at, byte) in damage {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        packet.truncate(cut.index(packet.len() + 1));
        if let Ok(reply) = Reply::parse(&packet) {
            prop_assert!(harmless(reply));
            prop_assert!(packet.len() <= MAX_REPLY);
        }
    }
}

fn harmless(reply: Reply<'_>) -> bool {
    reply.session.is_none_or(|id| id.len() <= 64 && id.bytes().all(|b| b.is_ascii_alphanumeric()))
}
