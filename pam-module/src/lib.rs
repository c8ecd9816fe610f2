//! The logic of `pam_gpusession.so`, without PAM's C interface (`so/`).
//!
//! It runs as root inside `sshd`, `login` and `su`. So it uses only the standard library and libc,
//! starts no thread, changes no signal handler, prints nothing, and keeps no state between calls.
//! Each call gives up at an absolute deadline. After any error the login continues with an unbound
//! login session: the daemon still serves its programs by their uid.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr
)]

mod exchange;
mod options;
mod variables;

use std::sync::Once;
use std::time::Instant;

use gpusession_login::{Malformed, Open, Reply, Request};

pub use exchange::exchange;
pub use options::Options;

/// Functions of PAM and the user database that the module needs.
pub trait Pam {
    /// Returns PAM's name of the service.
    fn service(&self) -> Option<String>;
    /// Returns the name of the user who logs in.
    fn user(&self) -> Option<String>;
    /// Returns the terminal, if any.
    fn tty(&self) -> Option<String>;
    /// Returns the remote host, if known.
    fn rhost(&self) -> Option<String>;
    /// Returns the uid of a user.
    fn uid_of(&self, user: &str) -> Option<u32>;
    /// Returns `true` if the variable is in PAM's list, or has another value in this process.
    ///
    /// `su` keeps the variables of its user and `su -l` does not. So a variable with the same value
    /// counts as not set, and is set again.
    fn is_set(&self, name: &str, value: &str) -> bool;
    /// Returns `true` if PAM's list has the variable.
    fn in_list(&self, name: &str) -> bool;
    /// Adds `NAME=VALUE` to PAM's list; returns `true` on success.
    fn put(&mut self, name: &str, value: &str) -> bool;
}

/// Reason why a login session was not bound or has no variables, for the log of the option `debug`
/// only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trouble {
    /// Failed system call, or the reason.
    pub what: &'static str,
    /// errno of a system call, else 0.
    pub errno: libc::c_int,
}

impl Trouble {
    fn new(what: &'static str) -> Self {
        Self { what, errno: 0 }
    }

    /// Creates the reason for a system call `what` that has just failed.
    fn errno(what: &'static str) -> Self {
        Self { what, errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0) }
    }
}

/// Reports a login session to the daemon, and sets its id and the variables of root's file.
///
/// The daemon says whether the user gets them. Variables that the user has set stay. `Ok(false)`:
/// the module ignores this login, or the user has no access.
pub fn open(pam: &mut impl Pam, options: &Options) -> Result<bool, Trouble> {
    let service = pam.service().unwrap_or_default();
    if options.skips(&service) {
        return Ok(false);
    }
    let user = pam.user().ok_or_else(|| Trouble::new("PAM names no user"))?;
    let uid = pam.uid_of(&user).ok_or_else(|| Trouble::new("the user is unknown"))?;
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
    // The deadline starts here, since the user database has timeouts of its own.
    let deadline = Instant::now() + options.timeout;
    let packet = exchange(&options.socket, &Request::Open(open).encode(), true, deadline)?;
    let reply = Reply::parse(&packet).map_err(|Malformed(what)| Trouble::new(what))?;
    let Some(session) = reply.session else { return Ok(false) };
    if !session.is_empty() {
        // The id in the environment of an outer login session is wrong for this one.
        pam.put("GPUSESSION_ID", session);
    }
    let text = variables::read(&options.environment)?;
    let variables = variables::parse(&text).map_err(|Malformed(what)| Trouble::new(what))?;
    for (name, value) in variables.into_iter().filter(|(name, _)| options.allows(name)) {
        if !pam.is_set(name, value) {
            pam.put(name, value);
        }
    }
    Ok(true)
}

/// Reports the end of a login session to the daemon, if [`open`] bound it.
///
/// Without the report the daemon notices the end of this process.
pub fn close(pam: &impl Pam, options: &Options) -> Result<bool, Trouble> {
    if options.skips(&pam.service().unwrap_or_default()) || !pam.in_list("GPUSESSION_ID") {
        return Ok(false);
    }
    let deadline = Instant::now() + options.timeout;
    exchange(&options.socket, &Request::Close.encode(), false, deadline)?;
    Ok(true)
}

/// Runs an entry point of the module, and returns `otherwise` after a panic.
///
/// A panic must neither unwind into the host program nor print to its user's terminal.
pub fn guard(entry: impl FnOnce() -> libc::c_int, otherwise: libc::c_int) -> libc::c_int {
    // The module contains its own standard library, so this is not the host program's hook.
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(entry)).unwrap_or(otherwise)
}

#[cfg(test)]
mod tests;
