//! Core dumps of this driver: a text that names the kernel, and bytes in place of global memory.

use gpusession_common::core_dump::{Dump, Settings, flag};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::{CStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::sync::LazyLock;

/// `CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE`
pub const CONTEXT_FLAGS: u32 = 0x20 | 0x40;
/// Bytes in place of global memory.
const MEMORY: usize = 3 << 20;

/// Locks the attributes of the process.
pub fn settings() -> MutexGuard<'static, Settings> {
    static SETTINGS: LazyLock<Mutex<Settings>> = LazyLock::new(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Mutex::new(Settings::new(host.trim(), std::process::id(), |name| std::env::var(name).ok()))
    });
    SETTINGS.lock()
}

/// Writes a dump in a thread of its own, which then aborts the process if it has to.
///
/// As NVIDIA's driver does (H200, driver 580), calls do not wait for it.
pub fn start(dump: Dump, kernel: &CStr) {
    let kernel = kernel.to_string_lossy().into_owned();
    let run = move || {
        if let Err(e) = write(&dump, &kernel) {
            eprintln!("simgpu: core dump: {e}");
        }
        if dump.aborts {
            std::process::abort();
        }
    };
    let _ = std::thread::Builder::new().name("core dump".into()).spawn(run);
}

fn write(dump: &Dump, kernel: &str) -> io::Result<()> {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    eprintln!("Starting GPU coredump generation");
    let mut file = File::create(OsString::from_vec(dump.name(time.as_secs())))?;
    writeln!(file, "simgpu core dump\nkernel {kernel}\nflags {:#x}", dump.flags & !flag::SKIP_ABORT)?;
    if dump.flags & flag::SKIP_GLOBAL_MEMORY == 0 {
        let memory: Vec<u8> = (0..MEMORY).map(|i| (i / 1000) as u8).collect();
        file.write_all(&memory)?;
    }
    Ok(())
}
