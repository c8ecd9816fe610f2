//! GPU core dumps: the driver writes one to a pipe, and the program gets its bytes.
//!
//! The driver opens the pipe by the path of this process's descriptor and writes from start to end.
//! It never aborts this process, because the program's library decides that.

use std::ffi::c_void;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpusession_common::core_dump::{attribute, flag};
use gpusession_proto::frame::op;

use crate::driver::{Driver, Status, check, status};
use crate::replies::Replies;

/// Bytes of a dump in one frame, at most.
const PIECE: usize = 256 << 10;

/// Whether the program has asked for dumps.
#[derive(Default)]
pub struct CoreDump(AtomicBool);

impl CoreDump {
    /// Lets a fault in a context that the driver creates later make a dump, the first one only.
    pub fn enable(&self, driver: &Driver, replies: &Arc<Replies>, flags: u32) -> Result<(), Status> {
        if self.0.swap(true, Ordering::Relaxed) {
            return Err(status::INVALID_VALUE);
        }
        let system = |_: io::Error| status::OPERATING_SYSTEM;
        let (from, own) = io::pipe().map_err(system)?;
        let idle = File::options().write(true).open("/dev/null").map_err(system)?;
        let path = format!("/proc/self/fd/{}\0", own.as_raw_fd());
        set(driver, attribute::FILE, path.as_bytes())?;
        set(driver, attribute::FLAGS, &(flags | flag::SKIP_ABORT).to_ne_bytes())?;
        let replies = replies.clone();
        let forward = move || {
            forward(from, own, &idle, |bytes| {
                replies.send_with(op::DUMPED, 0, 0, |w| w.bytes(bytes));
            })
        };
        std::thread::Builder::new().name("core dump".into()).spawn(forward).map_err(system)?;
        set(driver, attribute::ON_EXCEPTION, &[1])
    }
}

fn set(driver: &Driver, attribute: u32, value: &[u8]) -> Result<(), Status> {
    let (mut len, value) = (value.len(), value.as_ptr().cast::<c_void>());
    // SAFETY: the value has as many bytes as stated; the driver copies them.
    check(unsafe { (driver.call.cuCoredumpSetAttributeGlobal)(attribute, value, &mut len) })
}

/// Passes on what the driver writes, and nothing at the end.
///
/// `own` is the end that the driver opens once more.
fn forward(mut from: PipeReader, own: PipeWriter, idle: &File, send: impl Fn(&[u8])) {
    let mut bytes = vec![0; PIECE];
    let mut first = true;
    loop {
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => {
                if std::mem::take(&mut first) {
                    // Only the driver's own descriptor is left, whose close ends the pipe. The
                    // number stays taken: a later dump must reach no other file.
                    // SAFETY: both descriptors are this thread's.
                    unsafe { libc::dup3(idle.as_raw_fd(), own.as_raw_fd(), libc::O_CLOEXEC) };
                }
                send(&bytes[..len]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    send(&[]);
    std::mem::forget(own);
}

#[cfg(test)]
pub mod tests {
    use std::io::Write as _;
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn dump_ends_when_the_driver_closes_its_own_descriptor() {
        passes_a_dump_on();
    }

    /// Writes a dump as a driver does, and checks what the program would get.
    pub fn passes_a_dump_on() {
        let (from, own) = io::pipe().unwrap();
        let idle = File::options().write(true).open("/dev/null").unwrap();
        let path = format!("/proc/self/fd/{}", own.as_raw_fd());
        let sent = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let sent = &sent;
            scope.spawn(move || forward(from, own, &idle, |bytes| sent.lock().unwrap().push(bytes.to_vec())));
            let mut driver = File::create(&path).unwrap();
            driver.write_all(&[7; 3 * PIECE]).unwrap();
            driver.write_all(b"end").unwrap();
        });
        let sent = sent.into_inner().unwrap();
        assert!(sent.iter().all(|piece| piece.len() <= PIECE));
        let dump = sent.concat();
        assert_eq!((dump.len(), &dump[3 * PIECE..]), (3 * PIECE + 3, &b"end"[..]));
        assert_eq!(sent.iter().filter(|piece| piece.is_empty()).count(), 1, "one end");
        File::create(&path).unwrap().write_all(b"a second dump goes nowhere").unwrap();
    }
}
