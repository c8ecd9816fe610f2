//! What `pam_gpusession.so` does at login, apart from PAM's C interface (`so/`).
//!
//! It runs inside `sshd`, `login` and `su` as root, so that it uses the standard library only, starts no thread, changes
//! no signal, prints nothing, keeps no state between calls, and gives up at an absolute deadline. Whatever goes wrong, the
//! login goes on without a GPU session: programs are still served by their uid.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr
)]

mod exchange;
mod options;

use std::sync::Once;
use std::time::Instant;

use gpusession_login::{Malformed, Open, Reply, Request};

pub use exchange::exchange;
pub use options::Options;

/// What the module needs of PAM and of the user database.
pub trait Pam {
    /// The name that PAM gives the application's service.
    fn service(&self) -> Option<String>;
    /// The user who logs in.
    fn user(&self) -> Option<String>;
    /// The terminal, if there is one.
    fn tty(&self) -> Option<String>;
    /// Where the user comes from, if that is known.
    fn rhost(&self) -> Option<String>;
    /// The uid of a user.
    fn uid_of(&self, user: &str) -> Option<u32>;
    /// Whether the session has a variable already: in PAM's list, or with another value in this process. `su` keeps its user's,
    /// `su -l` does not, so that one with the same value is set again.
    fn is_set(&self, name: &str, value: &str) -> bool;
    /// Whether PAM's list has a variable.
    fn in_list(&self, name: &str) -> bool;
    /// Adds `NAME=VALUE` to PAM's list; whether that worked.
    fn put(&mut self, name: &str, value: &str) -> bool;
}

/// Why a session was not bound. For the log of the option `debug`; never for the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trouble {
    /// What went wrong.
    pub what: &'static str,
    /// The kernel's reason; 0 where it has none.
    pub errno: libc::c_int,
}

impl Trouble {
    fn new(what: &'static str) -> Self {
        Self { what, errno: 0 }
    }

    /// The system call `what` has just failed.
    fn errno(what: &'static str) -> Self {
        Self { what, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
    }
}

/// Opens a session: tells the daemon, and sets what it answers unless the user has set it. `Ok(false)` if there is nothing
/// to do for this login.
pub fn open(pam: &mut impl Pam, options: &Options) -> Result<bool, Trouble> {
    let service = pam.service().unwrap_or_default();
    if options.skips(&service) {
        return Ok(false);
    }
    let user = pam.user().ok_or_else(|| Trouble::new("PAM names no user"))?;
    let uid = pam.uid_of(&user).ok_or_else(|| Trouble::new("the user has no uid"))?;
    if uid < options.min_uid {
        return Ok(false);
    }
    let open = Open {
        uid,
        service,
        user,
        tty: pam.tty().unwrap_or_default(),
        rhost: pam.rhost().unwrap_or_default(),
    };
    // The user database has its own patience; the deadline is for the daemon.
    let deadline = Instant::now() + options.timeout;
    let packet = exchange(&options.socket, &Request::Open(open).encode(), true, deadline)?;
    let reply = Reply::parse(&packet).map_err(|Malformed(what)| Trouble::new(what))?;
    for (name, value) in reply.environment.iter().filter(|(name, _)| options.allows(name)) {
        // The session's id is ours, and another one in an outer session's environment is stale here.
        if *name == "GPUSESSION_ID" || !pam.is_set(name, value) {
            pam.put(name, value);
        }
    }
    Ok(!reply.environment.is_empty())
}

/// Closes a session: tells the daemon, if [`open`] did. The daemon would notice the end of this process anyway.
pub fn close(pam: &impl Pam, options: &Options) -> Result<bool, Trouble> {
    if options.skips(&pam.service().unwrap_or_default()) || !pam.in_list("GPUSESSION_ID") {
        return Ok(false);
    }
    let deadline = Instant::now() + options.timeout;
    exchange(&options.socket, &Request::Close.encode(), false, deadline)?;
    Ok(true)
}

/// Runs an entry of the module. A panic ends here, in silence: it must neither unwind into the host program nor print into
/// its user's terminal.
pub fn guard(entry: impl FnOnce() -> libc::c_int, otherwise: libc::c_int) -> libc::c_int {
    // The module has a standard library of its own, so that this is not the hook of the host program.
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(entry)).unwrap_or(otherwise)
}

#[cfg(test)]
mod tests;
