//! Journal entries on which an administrator may act: one table of events with message ids.
//!
//! An entry has `message_id = %Event::… .id()` and, as far as it knows them, the fields
//! `gpusession_lease`, `gpusession_server`, `gpusession_client`, `gpusession_user`,
//! `gpusession_worker`, `gpusession_session` and `gpusession_reason`; tracing-journald writes their
//! names in capitals.
//!
//! `journalctl -x` shows the texts below from `units/catalog`, which [`catalog`] writes. An id
//! never changes its meaning.

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident = $id:literal: $who:expr, $subject:literal, $page:literal, $text:literal;)+) => {
        /// An event on which an administrator may act.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Event {
            $($(#[$doc])* $name),+
        }

        impl Event {
            /// All events, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns number, catalogs, subject, manual page and text.
            const fn row(self) -> (u128, &'static [&'static str], &'static str, &'static str, &'static str) {
                match self { $(Self::$name => ($id, $who, $subject, $page, $text)),+ }
            }
        }
    };
}

/// Names of the catalogs: one for each package whose daemon logs events.
pub const CATALOGS: &[&str] = BOTH;
const CLIENT: &[&str] = &["gpusession"];
const SERVER: &[&str] = &["gpuserver"];
const BOTH: &[&str] = &["gpusession", "gpuserver"];

events! {
    /// A lease of GPUs was granted.
    LeaseGranted = 0xa644770082934e8291254c1e8b4db1d8: BOTH, "A lease of GPUs was granted", "gpusession(1)",
        "The server @GPUSESSION_SERVER@ has granted the lease @GPUSESSION_LEASE@.\n\
         On the client, programs of users with access now run on its GPUs; `gpusession list` shows them.";
    /// A lease of GPUs has to wait.
    LeaseWaits = 0x3c5bcca2e10b4c509583dce6a9babeb1: CLIENT, "A lease of GPUs has to wait", "gpusession.toml(5)",
        "No server has granted the request: @GPUSESSION_REASON@.\n\
         The daemon repeats the request with growing pauses; `gpusession status` shows the place in the queue.\n\
         If this lasts, check whether the servers are reachable, request less in gpusession.toml, or add servers.";
    /// A lease of GPUs was lost.
    LeaseLost = 0x83f6a800a3ea487e81baca4df66f999a: CLIENT, "A lease of GPUs was lost", "gpusession-status(1)",
        "The lease @GPUSESSION_LEASE@ was lost, not released: @GPUSESSION_REASON@.\n\
         Programs that ran on it get CUDA_ERROR_DEVICE_UNAVAILABLE.\n\
         The daemon requests a configured lease again; open shells can use the new one.";
    /// A lease of GPUs is idle.
    LeaseIdle = 0x4ce9ee2052f4489a85b0b26cf698af47: BOTH, "A lease of GPUs is idle", "gpuserver.toml(5)",
        "No program has worked on the lease @GPUSESSION_LEASE@ for a while, so the server will act: @GPUSESSION_REASON@.\n\
         Any CUDA work prevents that. An administrator of the server sets the times in gpuserver.toml, such as warn_after.";
    /// A lease of GPUs is about to end.
    LeaseEnds = 0x17829b7dd98440379937ec7d812333f1: CLIENT, "A lease of GPUs is about to end", "gpusession(1)",
        "The lease @GPUSESSION_LEASE@ will end: @GPUSESSION_REASON@.\n\
         Programs on it should save their work, since they lose their GPUs then.\n\
         The daemon requests a configured lease again afterwards, unless the daemon itself stops.";
    /// A limit refuses GPUs.
    LimitRefuses = 0x5177d173d2ef49f288aba01572469454: BOTH, "A limit refuses GPUs", "gpuserver.toml(5)",
        "The request exceeds a limit of this client, user or lease: @GPUSESSION_REASON@.\n\
         Request less, end a program, or raise the limit on the server (`gpuserver limits` shows the limits in force).";
    /// A lease of GPUs was parked.
    LeaseParked = 0x8e7515e298c743afb957f9de8ab9f3bf: BOTH, "A lease of GPUs was parked", "gpusession-unpark(1)",
        "The server moved the device memory of the lease @GPUSESSION_LEASE@ to host memory, so that others can use the GPU.\n\
         The next CUDA call brings it back; no data is lost.";
    /// A lease of GPUs is over.
    LeaseReclaimed = 0xb33b7a197cde42a497afb486369f74ce: SERVER, "A lease of GPUs is over", "gpuserver-leases(8)",
        "The lease @GPUSESSION_LEASE@ of @GPUSESSION_CLIENT@ is over: @GPUSESSION_REASON@. The server has stopped its workers.";
    /// Workers of a server run with fewer restrictions than the server can set.
    IsolationLacking = 0x50a32f2d107847209c47fcc4203350fc: SERVER, "Workers are not fully isolated", "gpuserver.toml(5)",
        "Workers of the server @GPUSESSION_SERVER@ keep rights that they do not need: @GPUSESSION_REASON@.\n\
         A program that takes over its worker then reaches what the workers' user can reach, such as other workers.\n\
         Enable what is missing, set isolation = \"require\", and restart the server; `gpuserver check-isolation` shows the result.";
    /// The driver gave device memory that still had bytes of another process.
    MemoryLeft = 0x67f223c8fff04baeb18c37f9a3557ebb: SERVER, "Memory of a GPU was not cleared", "gpuserver.toml(5)",
        "A worker for @GPUSESSION_CLIENT@ got device memory from the driver that had bytes of an earlier process: @GPUSESSION_REASON@.\n\
         Programs of this client may have read such bytes. Give clients that must not read each other's data GPUs of their own,\n\
         and report the version of the driver to NVIDIA; `gpuserver status` shows it.";
    /// A GPU server does not answer.
    ServerLost = 0x6ff34f01d228494abdf676921495ecad: CLIENT, "A GPU server does not answer", "gpusession-status(1)",
        "The server @GPUSESSION_SERVER@ does not answer: @GPUSESSION_REASON@. Programs on its GPUs wait for 60 seconds.\n\
         Check whether it runs (systemctl status gpuserver, on the server) and whether the network lets ports 7601 and 7602 through.";
    /// A GPU server answers again.
    ServerBack = 0xe377d21fb9aa491e9c2ccdce898d5c6f: CLIENT, "A GPU server answers again", "gpusession(1)",
        "The server @GPUSESSION_SERVER@ answers again. Leases on it continue, or the daemon requests them again.";
    /// All GPUs are taken.
    PoolExhausted = 0x1b2f23ff354d44fb8b9cec6cfd471c07: SERVER, "All GPUs are taken", "gpuserver-leases(8)",
        "No GPU of this server is free for @GPUSESSION_CLIENT@: @GPUSESSION_REASON@.\n\
         `gpuserver leases` shows the leases and their GPUs.";
    /// Versions do not fit together.
    ProtocolMismatch = 0x8ea3d210ae18426688c40c4b756bf439: BOTH, "Versions do not fit together", "gpusession(1)",
        "Client and server, or library and daemon, use different versions of the protocol: @GPUSESSION_REASON@.\n\
         Update the older one.";
    /// A program got no GPU.
    AccessDenied = 0x4195922267ea4a9eba8b2031c74f4446: CLIENT, "A program got no GPU", "gpusession.toml(5)",
        "A program of user @GPUSESSION_USER@ got no GPU: @GPUSESSION_REASON@.\n\
         [access] and [[lease]] in gpusession.toml determine which users get GPUs.";
    /// A program could not use the GPUs that were granted to it.
    ProgramUnserved = 0x5d0f6a3b1c7e4b0c9a52e8f4d7316ab9: CLIENT, "A program could not reach its GPUs", "gpusession-status(1)",
        "A program of user @GPUSESSION_USER@ was granted GPUs of the lease @GPUSESSION_LEASE@, but reports that it could\n\
         not use them: @GPUSESSION_REASON@.\n\
         If it could not connect, open data_ports of the server (7602) for this machine; a lease alone needs only the control port.\n\
         The server's journal shows other reasons why a worker refused it.";
    /// A program lost its GPUs while it ran.
    ProgramLost = 0x0e9b7c52f8d64a6fb3714c2d95ea08f3: CLIENT, "A program lost its GPUs", "gpusession-status(1)",
        "A program of user @GPUSESSION_USER@ ran on GPUs of the lease @GPUSESSION_LEASE@ and reports that it lost\n\
         them: @GPUSESSION_REASON@.\n\
         Its CUDA calls return CUDA_ERROR_DEVICE_UNAVAILABLE; the next program gets a new worker, if the lease still exists.";
    /// A program's connection to its GPUs broke, and has come back.
    ProgramBack = 0xe393be9b6a434016ae3d34cc0851e035: BOTH, "A program's connection is back", "gpuserver.toml(5)",
        "The connection of a program on the lease @GPUSESSION_LEASE@ to its GPUs broke and came back: @GPUSESSION_REASON@.\n\
         The program has lost nothing. If this repeats, look for a firewall that forgets connections or a link that fails;\n\
         resume_grace in gpuserver.toml is the time for which a worker waits.";
    /// A certificate was renewed.
    IdentityRenewed = 0x3b1f7c0a52c946d8a0e5d94c7e61b823: BOTH, "A certificate was renewed", "gpusession(1)",
        "A client or a server of the pool has a new certificate. Leases, programs and connections continue.";
    /// A certificate expires soon.
    IdentityExpiring = 0x9d4e2b61f70a4c35b8c21f6a0d93e754: BOTH, "A certificate expires soon", "gpusession-status(1)",
        "A certificate of the pool expires soon, although daemons and servers renew theirs: @GPUSESSION_REASON@.\n\
         Without a valid certificate, a client gets no GPUs and its leases end.\n\
         On the client, `gpusession status` shows the date; check that gpusessiond runs and reaches a server.";
    /// A certificate has expired.
    IdentityExpired = 0x61c8a7e94f1b4d02937d05be2c48fa16: BOTH, "A certificate has expired", "gpusession-status(1)",
        "A certificate of the pool has expired: @GPUSESSION_REASON@.\n\
         gpusessiond renews an expired certificate for the time renew_grace of the servers (30 days).\n\
         Later, `gpuserver clients forget NAME` on each server and `gpusession join` with a new token give the client a new one.\n\
         If no certificate can have expired, compare the clocks of client and server.";
    /// A machine joined the pool.
    ClientJoined = 0x06b9233f1feb4575a1aabe758093c44c: SERVER, "A machine joined the pool", "gpuserver-clients(8)",
        "The machine @GPUSESSION_CLIENT@ joined the pool and has an identity now. `gpuserver clients` lists all;\n\
         `gpuserver clients revoke NAME` ends its use of the pool.";
    /// A machine was not let into the pool.
    ClientRefused = 0xa71b948842024764991c302778d81279: SERVER, "A machine was not let into the pool", "gpuserver-token(8)",
        "A machine tried to join the pool as @GPUSESSION_CLIENT@: @GPUSESSION_REASON@.\n\
         If an administrator set that machine up, make a new token for it with `gpuserver token create`; else someone tries tokens.";
    /// A client's name has another identity than before.
    ClientReplaced = 0x068996a9ff4644b794aa4c61eb49b3c0: SERVER, "A client's name belongs to another machine", "gpuserver-clients(8)",
        "The name @GPUSESSION_CLIENT@ has another identity than before: @GPUSESSION_REASON@.\n\
         `gpuserver clients forget` freed the name. The new machine has the limits and reservations of that name.";
    /// An identity was refused.
    IdentityRefused = 0xed0ab48f4d30493e9dada75a9b049e0d: BOTH, "An identity was refused", "gpusession-status(1)",
        "A server does not accept the identity of a client: @GPUSESSION_REASON@.\n\
         An administrator has revoked or forgotten it, a later certificate has replaced it, or two machines use it.\n\
         On the client, `gpusession status` shows its identity; `gpuserver clients` of the server lists those that it knows.";
    /// A rotation of the pool's authority took a step.
    AuthorityRotation = 0x3be2075ef0544f15856441b8cffbdc99: BOTH, "The pool's authority is being replaced", "gpuserver-pool-rotate(8)",
        "A rotation of the pool's authority took a step: @GPUSESSION_REASON@.\n\
         Leases, programs and connections continue. On each server, `gpuserver pool rotate status` shows the clients that lack\n\
         the new authority, and the next command.";
    /// A right was revoked in the whole pool.
    StatementTaken = 0x2c41d7be90a84d5fa6f2e3b7745c1d88: SERVER, "A right was revoked in the pool", "gpuserver-statements(8)",
        "A statement of the server @GPUSESSION_SERVER@ holds on this server: @GPUSESSION_REASON@.\n\
         The pool's servers hand statements to each other; `gpuserver statements list` shows all of them.\n\
         If no administrator asked for it, that server may have been taken over.";
    /// Another server of the pool does not answer.
    PeerSilent = 0x7d0b6a52c8e94f3b8c15d9e2fb60a413: SERVER, "Another server of the pool does not answer", "gpuserver.toml(5)",
        "The server at @GPUSESSION_SERVER@ hands over no statements: @GPUSESSION_REASON@.\n\
         A client that is revoked there is served here until the servers reach each other.\n\
         `gpuserver status` shows the latest contact of each server in `peers`.";
    /// A login session began.
    SessionOpened = 0xbbcbf565bfc34c4aa087ee0927b52991: CLIENT, "A login session began", "pam_gpusession(8)",
        "Session @GPUSESSION_SESSION@ of user @GPUSESSION_USER@ began. It holds the user's leases of class \"session\" until it ends.";
    /// A login session ended.
    SessionClosed = 0xada61952c3c743fc954ca9760eb636db: CLIENT, "A login session ended", "pam_gpusession(8)",
        "Session @GPUSESSION_SESSION@ of user @GPUSESSION_USER@ ended; the daemon releases its leases.";
}

impl Event {
    /// Returns the `MESSAGE_ID`: 32 hexadecimal digits.
    pub fn id(self) -> String {
        format!("{:032x}", self.row().0)
    }
}

/// Returns one of [`CATALOGS`], in the form that `journalctl --update-catalog` reads.
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
