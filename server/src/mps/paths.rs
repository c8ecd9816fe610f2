//! The length of socket names below the folder of the daemons.

use std::path::Path;

/// Longest name of a daemon's socket, below the folder of all daemons.
const LONGEST_SOCKET: &str = "4294967295/p/control_privileged";

/// Checks that socket addresses below this folder are short enough.
pub fn check_folder(folder: &Path) -> Result<(), String> {
    // A socket's address has 108 bytes, including the final zero.
    let len = folder.as_os_str().len() + 1 + LONGEST_SOCKET.len();
    match len {
        0..=107 => Ok(()),
        _ => Err(format!(
            "{}: too long for MPS, whose socket names there would exceed 107 bytes",
            folder.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_short_names() {
        check_folder(Path::new("/run/gpuserver/mps")).unwrap();
        assert!(check_folder(&Path::new("/").join("x".repeat(90))).unwrap_err().contains("too long"));
    }
}
