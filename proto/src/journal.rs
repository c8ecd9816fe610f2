//! What the daemons write to the journal that an administrator acts on: one table of events with their message ids.
//!
//! An event is logged with `message_id = %Event::… .id()` and the fields `gpusession_lease`, `gpusession_server`,
//! `gpusession_client`, `gpusession_user`, `gpusession_worker`, `gpusession_session` and `gpusession_reason`, as far as it has them; tracing-journald
//! writes their names in capitals. `journalctl -x` shows the texts below, from `units/catalog`, which is
//! this table ([`catalog`]). An id never changes its meaning.

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident = $id:literal: $who:expr, $subject:literal, $page:literal, $text:literal;)+) => {
        /// Something that an administrator may act on.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Event {
            $($(#[$doc])* $name),+
        }

        impl Event {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Number, catalogs, subject, the manual page that helps, and text.
            const fn row(self) -> (u128, &'static [&'static str], &'static str, &'static str, &'static str) {
                match self { $(Self::$name => ($id, $who, $subject, $page, $text)),+ }
            }
        }
    };
}

/// The catalogs that have an event: those of the packages whose daemons log it.
pub const CATALOGS: &[&str] = BOTH;
const CLIENT: &[&str] = &["gpusession"];
const SERVER: &[&str] = &["gpuserver"];
const BOTH: &[&str] = &["gpusession", "gpuserver"];

events! {
    /// A lease of GPUs was granted.
    LeaseGranted = 0xa644770082934e8291254c1e8b4db1d8: BOTH, "A lease of GPUs was granted", "gpusession(1)",
        "The server @GPUSESSION_SERVER@ has granted the lease @GPUSESSION_LEASE@. On the client, programs of users who have access run on its GPUs\n\
         from now on: `gpusession list` shows them.";
    /// A lease of GPUs has to wait.
    LeaseWaits = 0x3c5bcca2e10b4c509583dce6a9babeb1: CLIENT, "A lease of GPUs has to wait", "gpusession.toml(5)",
        "No server gives what is asked for: @GPUSESSION_REASON@. The daemon goes on asking, with growing pauses;\n\
         `gpusession status` shows the place in the queue. If this lasts, see whether the servers can be reached, ask for less in\n\
         gpusession.toml, or for more servers.";
    /// A lease of GPUs was lost.
    LeaseLost = 0x83f6a800a3ea487e81baca4df66f999a: CLIENT, "A lease of GPUs was lost", "gpusession-status(1)",
        "The lease @GPUSESSION_LEASE@ is gone without having been released: @GPUSESSION_REASON@. Programs that ran on it get\n\
         CUDA_ERROR_DEVICE_UNAVAILABLE. A configured lease is asked for anew; shells need not be opened again.";
    /// A lease of GPUs is idle.
    LeaseIdle = 0x4ce9ee2052f4489a85b0b26cf698af47: BOTH, "A lease of GPUs is idle", "gpuserver.toml(5)",
        "Nothing has run on the lease @GPUSESSION_LEASE@ for a while, and the server will take a measure: @GPUSESSION_REASON@.\n\
         Any CUDA work ends that. An administrator of the server sets the times, warn_after and the others of gpuserver.toml.";
    /// A lease of GPUs is about to end.
    LeaseEnds = 0x17829b7dd98440379937ec7d812333f1: CLIENT, "A lease of GPUs is about to end", "gpusession(1)",
        "The lease @GPUSESSION_LEASE@ will end: @GPUSESSION_REASON@. Programs on it should save their work: they lose their GPUs then.\n\
         A configured lease is asked for anew afterwards, unless the daemon itself stops.";
    /// A limit refuses GPUs.
    LimitRefuses = 0x5177d173d2ef49f288aba01572469454: BOTH, "A limit refuses GPUs", "gpuserver.toml(5)",
        "What is asked for is beyond a limit of this client, user or lease: @GPUSESSION_REASON@. Ask for less, end a program, or raise the\n\
         limit on the server (`gpuserver limits` shows which hold).";
    /// A lease of GPUs was parked.
    LeaseParked = 0x8e7515e298c743afb957f9de8ab9f3bf: BOTH, "A lease of GPUs was parked", "gpusession-unpark(1)",
        "The device memory of the lease @GPUSESSION_LEASE@ was moved to the server's host memory so that others can use the GPU.\n\
         It comes back by itself at the next CUDA call; nothing is lost.";
    /// A lease of GPUs is over.
    LeaseReclaimed = 0xb33b7a197cde42a497afb486369f74ce: SERVER, "A lease of GPUs is over", "gpuserver-leases(8)",
        "The lease @GPUSESSION_LEASE@ of @GPUSESSION_CLIENT@ is over: @GPUSESSION_REASON@. Its workers have been ended.";
    /// A GPU server does not answer.
    ServerLost = 0x6ff34f01d228494abdf676921495ecad: CLIENT, "A GPU server does not answer", "gpusession-status(1)",
        "The server @GPUSESSION_SERVER@ does not answer: @GPUSESSION_REASON@. Programs on its GPUs wait for it for 60 seconds.\n\
         See whether it runs (systemctl status gpuserver, there) and whether ports 7601 and 7602 are open on the way.";
    /// A GPU server answers again.
    ServerBack = 0xe377d21fb9aa491e9c2ccdce898d5c6f: CLIENT, "A GPU server answers again", "gpusession(1)",
        "The server @GPUSESSION_SERVER@ answers again. Leases on it go on, or are asked for anew.";
    /// All GPUs are taken.
    PoolExhausted = 0x1b2f23ff354d44fb8b9cec6cfd471c07: SERVER, "All GPUs are taken", "gpuserver-leases(8)",
        "No GPU of this server is free for @GPUSESSION_CLIENT@: @GPUSESSION_REASON@. `gpuserver leases` shows who holds what.";
    /// Versions do not fit together.
    ProtocolMismatch = 0x8ea3d210ae18426688c40c4b756bf439: BOTH, "Versions do not fit together", "gpusession(1)",
        "Client and server, or library and daemon, do not speak the same version of the protocol: @GPUSESSION_REASON@.\n\
         Update the older one.";
    /// A program got no GPU.
    AccessDenied = 0x4195922267ea4a9eba8b2031c74f4446: CLIENT, "A program got no GPU", "gpusession.toml(5)",
        "A program of user @GPUSESSION_USER@ got no GPU: @GPUSESSION_REASON@. [access] and [[lease]] in gpusession.toml say who has GPUs.";
    /// A program could not use the GPUs that were granted to it.
    ProgramUnserved = 0x5d0f6a3b1c7e4b0c9a52e8f4d7316ab9: CLIENT, "A program could not reach its GPUs", "gpusession-status(1)",
        "A program of user @GPUSESSION_USER@ was granted GPUs of the lease @GPUSESSION_LEASE@ and could not use them, as it says:\n\
         @GPUSESSION_REASON@. If no connection came about, open data_ports of the server (7602) for this machine: holding a\n\
         lease needs its control port only. What else a worker refuses is in the server's journal.";
    /// A program lost its GPUs while it ran.
    ProgramLost = 0x0e9b7c52f8d64a6fb3714c2d95ea08f3: CLIENT, "A program lost its GPUs", "gpusession-status(1)",
        "A program of user @GPUSESSION_USER@ ran on GPUs of the lease @GPUSESSION_LEASE@ and has lost them, as it says:\n\
         @GPUSESSION_REASON@. Its CUDA calls answer CUDA_ERROR_DEVICE_UNAVAILABLE; the next program is served by a new worker, if the lease\n\
         is still held.";
    /// A login session began.
    SessionOpened = 0xbbcbf565bfc34c4aa087ee0927b52991: CLIENT, "A login session began", "pam_gpusession(8)",
        "Session @GPUSESSION_SESSION@ of user @GPUSESSION_USER@ began. Leases of class \"session\" that are the user's are held until it ends.";
    /// A login session ended.
    SessionClosed = 0xada61952c3c743fc954ca9760eb636db: CLIENT, "A login session ended", "pam_gpusession(8)",
        "Session @GPUSESSION_SESSION@ of user @GPUSESSION_USER@ ended; its leases go back.";
}

impl Event {
    /// `MESSAGE_ID`: 32 hexadecimal digits.
    pub fn id(self) -> String {
        format!("{:032x}", self.row().0)
    }
}

/// One of [`CATALOGS`], as `journalctl --update-catalog` reads it.
pub fn catalog(name: &str) -> String {
    let mut out = String::from(
        "# Written from proto/src/journal.rs: GPUSESSION_BLESS=1 cargo test -p gpusession-proto journal\n",
    );
    for event in Event::ALL {
        let (_, catalogs, subject, page, text) = event.row();
        if !catalogs.contains(&name) {
            continue;
        }
        out += &format!(
            "\n-- {}\nSubject: {subject}\nDefined-By: gpusession\nDocumentation: man:{page}\n\n{text}\n",
            event.id()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_catalogs_are_this_table() {
        for name in CATALOGS {
            let path = format!("{}/../units/catalog/{name}.catalog", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("GPUSESSION_BLESS").is_some() {
                std::fs::write(&path, catalog(name)).unwrap();
            }
            assert_eq!(std::fs::read_to_string(path).unwrap(), catalog(name));
        }
    }

    #[test]
    fn ids_are_as_journald_wants_them() {
        for (i, event) in Event::ALL.iter().enumerate() {
            assert!(event.id().len() == 32 && event.id() != "0".repeat(32));
            assert!(Event::ALL[..i].iter().all(|e| e.id() != event.id()), "{event:?}");
        }
    }
}
