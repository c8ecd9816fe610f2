//! Output of device code (`printf`, `assert`), which the driver prints when it synchronises.
//!
//! Stdout and stderr of this process are memory files. The worker reads them after each
//! synchronizing call and sends their content to the client.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use gpusession_proto::frame::{INLINE_MAX, op};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::replies::Replies;

/// The memory files behind stdout and stderr.
pub struct Output {
    files: Mutex<[File; 2]>,
}

impl Output {
    /// Redirects stdout and stderr of this process.
    pub fn redirect() -> io::Result<Self> {
        let file = |target: i32| -> io::Result<File> {
            let fd = memfd_create("output", MFdFlags::MFD_CLOEXEC)?;
            // SAFETY: replaces a standard descriptor of this process, which no value in this
            // program owns.
            if unsafe { libc::dup2(fd.as_raw_fd(), target) } < 0 {
                return Err(io::Error::last_os_error());
            }
            // Without O_APPEND, output after a truncation would leave a hole.
            // SAFETY: sets a status flag of a valid descriptor.
            unsafe { libc::fcntl(target, libc::F_SETFL, libc::O_APPEND) };
            Ok(fd.into())
        };
        Ok(Self { files: Mutex::new([file(1)?, file(2)?]) })
    }

    /// Appends frames with the output since the last call.
    ///
    /// Call it after the driver has synchronised.
    pub fn collect(&self, replies: &Replies, frames: &mut Vec<u8>) {
        // SAFETY: flushes C's streams, where the driver prints; null means all of them.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        let Ok(mut files) = self.files.lock() else { return };
        let fresh = |file: &File| file.metadata().map_or(0, |m| m.len());
        if files.iter().all(|f| fresh(f) == 0) {
            return;
        }
        let mut texts = files.iter_mut().map(|entry| {
            let len = fresh(entry) as usize;
            let mut text = vec![0; len];
            let read = entry.read_at(&mut text, 0).unwrap_or(0);
            text.truncate(read);
            let _ = entry.set_len(0);
            text
        });
        let (out, err) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
        let pieces = out.len().max(err.len()).div_ceil(INLINE_MAX);
        for i in 0..pieces {
            let piece = |text: &[u8]| text.chunks(INLINE_MAX).nth(i).unwrap_or_default().to_vec();
            replies.append(frames, op::OUTPUT, 0, 0, |w| {
                w.bytes(&piece(&out));
                w.bytes(&piece(&err));
            });
        }
    }
}
