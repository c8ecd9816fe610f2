//! Memory that other processes of the lease use, too.
//!
//! A descriptor that the program passes on is a sealed memory file with a token. The worker of the
//! process that imports it fetches the driver's own descriptor on the server.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;

use gpusession_proto::frame::op;
use gpusession_proto::share::Token;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::client::{Client, string, word};
use crate::clients;
use crate::entry::{
    INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, Result, UNKNOWN, driver, give,
};
use crate::streams;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const POSIX_FD: u32 = 1;

/// Returns the seals that forbid any change of a memory file.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE
}

/// Makes a descriptor of a token.
fn seal(token: &[u8; Token::LEN]) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"gpusession-memory", flags)?);
    file.write_all_at(token, 0)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
    Ok(file)
}

/// Reads the token of a descriptor.
///
/// For any other descriptor, returns the driver's error (H100, driver 580).
fn unseal(descriptor: i32) -> Result<[u8; Token::LEN]> {
    // SAFETY: the call makes a copy, or fails for a number that is no open descriptor.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(UNKNOWN);
    }
    // SAFETY: the copy was just created, and no other code knows it.
    let file = unsafe { File::from_raw_fd(copy) };
    // Other files than memory files have no seals, and a read of theirs could wait for ever.
    let sealed = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|_| UNKNOWN)?;
    let mut token = [0; Token::LEN];
    let complete = SealFlag::from_bits_truncate(sealed).contains(seals())
        && file.metadata().is_ok_and(|known| known.len() == Token::LEN as u64)
        && file.read_exact_at(&mut token, 0).is_ok()
        && Token::parse(&token).is_some();
    if complete { Ok(token) } else { Err(UNKNOWN) }
}

/// Asks workers for the object of a token: the current context's, then those of other leases.
///
/// Returns the client of the lease that has the object, and the worker's answer.
fn import(token: &[u8; Token::LEN]) -> Result<(&'static Client, u64)> {
    streams::shares();
    let first = clients::get()?;
    let others = clients::all()?.filter(|client| client.number != first.number);
    for client in std::iter::once(first).chain(others) {
        let reply = client.ask(op::SHARE_IMPORT, |w| w.bytes(token))?;
        if reply.status != NOT_SUPPORTED {
            client.check_status(reply.status)?;
            return Ok((client, word(&mut reply.reader())?));
        }
    }
    crate::trace::why(
        "shared memory: not imported: the process that exported it has ended or has another lease; \
         start both under one lease (GPUSESSION_LEASE)",
    );
    Err(NOT_SUPPORTED)
}

driver! {
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: u64) {
        let client = clients::of(handle).map_err(|_| INVALID_HANDLE)?;
        if shareable.is_null() || flags != 0 || kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        streams::shares();
        let reply = client.call(op::SHARE_EXPORT, |w| w.word(client.own(handle)))?;
        let mut reader = reply.reader();
        let token = string(&mut reader)?.try_into().map_err(|_| UNKNOWN)?;
        let file = seal(token).map_err(|_| OPERATING_SYSTEM)?;
        give(shareable.cast(), file.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: u32) {
        clients::get()?;
        if handle.is_null() || kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        let (client, object) = import(&unseal(shareable as usize as i32)?)?;
        give(handle, client.name(object))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use gpusession_proto::share::{Kind, Name, Secret};

    use super::*;

    fn token() -> [u8; Token::LEN] {
        let name = Name { kind: Kind::Memory, worker: [1; 16], object: 2, secret: Secret([3; 16]) };
        Token { name, offset: 0, size: 0 }.bytes()
    }

    #[test]
    fn sealed_token_is_read_through_any_copy_of_its_descriptor() {
        let file = seal(&token()).unwrap();
        assert_eq!(unseal(file.as_raw_fd()), Ok(token()));
        assert_eq!(unseal(file.try_clone().unwrap().as_raw_fd()), Ok(token()));
        assert!(file.write_all_at(&[0], 0).is_err() && file.set_len(0).is_err(), "nobody changes it");
    }

    #[test]
    fn other_descriptors_are_none_of_ours() {
        let file = |contents: &[u8], wanted: SealFlag| {
            let file = File::from(memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap());
            file.write_all_at(contents, 0).unwrap();
            fcntl(&file, FcntlArg::F_ADD_SEALS(wanted)).unwrap();
            unseal(file.as_raw_fd())
        };
        assert_eq!(file(&token(), seals()), Ok(token()));
        assert_eq!(file(&token(), seals() - SealFlag::F_SEAL_WRITE), Err(UNKNOWN), "may still change");
        assert_eq!(file(&[0; Token::LEN], seals()), Err(UNKNOWN), "other contents");
        assert_eq!(file(&token()[..63], seals()), Err(UNKNOWN));
        assert_eq!(file(&[token(), token()].concat(), seals()), Err(UNKNOWN));
        let (pipe, _writer) = io::pipe().unwrap();
        assert_eq!(unseal(pipe.as_raw_fd()), Err(UNKNOWN), "nothing waits for a pipe");
        let null = File::open("/dev/null").unwrap();
        assert_eq!((unseal(null.as_raw_fd()), unseal(-1)), (Err(UNKNOWN), Err(UNKNOWN)));
    }
}
