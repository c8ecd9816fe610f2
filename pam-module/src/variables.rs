//! The file of the variables that logins get, which only root may have written.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use gpusession_login::Malformed;
use gpusession_login::variables::{MAX_FILE, trusted};

use crate::Trouble;

pub use gpusession_login::variables::parse;

/// Returns the file's text; empty if there is no file.
///
/// # Errors
/// The file is not root's, or cannot be read.
pub fn read(path: &Path) -> Result<String, Trouble> {
    let failed =
        |what| move |error: std::io::Error| Trouble { what, errno: error.raw_os_error().unwrap_or(0) };
    // Neither a link of another user nor a pipe without a writer delays or redirects the login.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(failed("open the file of variables")(error)),
    };
    let metadata = file.metadata().map_err(failed("stat of the file of variables"))?;
    // SAFETY: geteuid cannot fail and touches no memory.
    trusted(&metadata, unsafe { libc::geteuid() }).map_err(|Malformed(what)| Trouble::new(what))?;
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text).map_err(failed("read the file of variables"))?;
    Ok(text)
}
