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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use gpusession_proto::frame::{HEADER, Header, Reader};

    use super::*;
    use crate::replies::tests::replies;

    /// Returns output that reads these two files instead of the process's own.
    fn output() -> (Output, [File; 2]) {
        let file = || -> File { memfd_create("output", MFdFlags::MFD_CLOEXEC).unwrap().into() };
        let files = [file(), file()];
        // The driver's end appends, as that of a redirected descriptor does.
        let appending = |file: &File| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            File::options().append(true).open(path).unwrap()
        };
        let ends = [appending(&files[0]), appending(&files[1])];
        (Output { files: Mutex::new(files) }, ends)
    }

    fn collected(output: &Output) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut frames = Vec::new();
        output.collect(&replies().0, &mut frames);
        let (mut rest, mut texts) = (&frames[..], Vec::new());
        while let Some((head, bytes)) = rest.split_first_chunk::<HEADER>() {
            let header = Header::parse(head).unwrap();
            assert_eq!(header.op.get(), op::OUTPUT);
            let (body, next) = bytes.split_at(header.body_len());
            let mut r = Reader::new(body);
            texts.push((r.bytes().unwrap().to_vec(), r.bytes().unwrap().to_vec()));
            rest = next;
        }
        texts
    }

    #[test]
    fn client_gets_each_line_once() {
        let (output, [mut out, mut err]) = output();
        assert!(collected(&output).is_empty());
        out.write_all(b"one").unwrap();
        assert_eq!(collected(&output), [(b"one".to_vec(), Vec::new())]);
        assert!(collected(&output).is_empty());
        err.write_all(b"two").unwrap();
        out.write_all(b"three").unwrap();
        assert_eq!(collected(&output), [(b"three".to_vec(), b"two".to_vec())], "without a hole");
    }

    #[test]
    fn long_output_travels_in_several_frames() {
        let (output, [mut out, mut err]) = output();
        out.write_all(&vec![b'x'; 2 * INLINE_MAX + 1]).unwrap();
        err.write_all(b"e").unwrap();
        let texts = collected(&output);
        let lengths: Vec<_> = texts.iter().map(|(out, err)| (out.len(), err.len())).collect();
        assert_eq!(lengths, [(INLINE_MAX, 1), (INLINE_MAX, 0), (1, 0)]);
    }
}
