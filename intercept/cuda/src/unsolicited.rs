//! Frames that a worker sends without a request: output, host functions, changes of host memory,
//! core dumps.

use std::sync::Arc;
use std::time::Duration;

use gpusession_link::{Events, Link, grant};
use gpusession_proto::grant::Outage;

use crate::status::DEVICE_UNAVAILABLE;
use crate::{clients, core_dumps, host_functions, regions, trace};

/// Receiver of a worker's unsolicited frames, with the number of its client.
struct Receiver(u8);

/// Returns the receiver of the unsolicited frames of a client's worker.
pub fn receiver(client: u8) -> Box<dyn Events> {
    Box::new(Receiver(client))
}

impl Events for Receiver {
    fn output(&self, out: &[u8], err: &[u8]) {
        // Goes through the program's own stdio, to keep the order with the program's lines.
        for (text, stream) in [(out, c_stdout()), (err, c_stderr())] {
            if !text.is_empty() {
                // SAFETY: `stream` is one of C's standard streams, and `text` has `text.len()`
                // readable bytes.
                unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream) };
            }
        }
    }

    fn call_host(&self, _link: &Arc<Link>, id: u64, status: i32) {
        host_functions::call(id, status);
    }

    fn host_changed(&self, region: u64, offset: u64, bytes: &[u8]) {
        regions::changed(region, offset, bytes);
    }

    fn core_dump(&self, status: i32, bytes: &[u8]) {
        core_dumps::received(self.0, status, bytes);
    }

    fn lost(&self, reason: &str) {
        core_dumps::lost(self.0);
        if let Some(client) = clients::by_number(self.0) {
            client.poison(DEVICE_UNAVAILABLE);
        }
        trace::why(reason);
        clients::lost(self.0, reason);
    }

    fn interrupted(&self, reason: &str) {
        core_dumps::interrupted(self.0);
        trace::why(reason);
    }

    fn outage(&self, outage: Outage) -> Option<String> {
        grant::interrupted(outage)
    }

    fn resumed(&self, after: Duration) {
        trace::why(&format!("the connection is back after {} ms, without any loss", after.as_millis()));
    }
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

fn c_stdout() -> *mut libc::FILE {
    // SAFETY: libc sets this pointer before main; the library only reads it.
    unsafe { stdout }
}

fn c_stderr() -> *mut libc::FILE {
    // SAFETY: libc sets this pointer before main; the library only reads it.
    unsafe { stderr }
}
