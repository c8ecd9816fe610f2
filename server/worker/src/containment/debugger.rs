//! Sockets that the driver's debugger asks for before it writes a core dump, and that lead nowhere.
//!
//! The debugger (`libcudadebugger.so.1`, seen with driver 580) listens on TCP port 49152 of all
//! addresses and on an abstract Unix socket. It tries again without end if it cannot, and waits for
//! no connection. So it gets descriptors that never have an event, and its calls on them succeed.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use seccompiler::{SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::denied::install;

/// Descriptors for the next sockets; -1 once one is in use.
static STREAM: AtomicI32 = AtomicI32::new(-1);
static DATAGRAM: AtomicI32 = AtomicI32::new(-1);

/// `si_code` of a signal that a filter sends.
const SYS_SECCOMP: libc::c_int = 1;

/// Lets the debugger of this process make one socket of each kind; later ones are refused.
///
/// Without other restrictions it keeps this host's ports closed.
pub fn give_stand_ins() -> Result<(), String> {
    let [stream, datagram] = [descriptor()?, descriptor()?];
    STREAM.store(stream, Ordering::SeqCst);
    DATAGRAM.store(datagram, Ordering::SeqCst);
    // SAFETY: an all-zero action is valid; the handler only reads the signal's facts, changes its
    // thread's registers and uses atomics.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_socket as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    if installed != 0 {
        return Err(format!("SIGSYS: {}", std::io::Error::last_os_error()));
    }
    let when = |argument, value: u64| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
            .map_err(text)?;
        SeccompRule::new(vec![condition]).map_err(text)
    };
    let own =
        || [stream, datagram].into_iter().map(|fd| when(0, fd as u64)).collect::<Result<Vec<_>, String>>();
    // The later filter's answer holds, but for a signal, which precedes every error.
    install(
        BTreeMap::from([
            (libc::SYS_bind, own()?),
            (libc::SYS_listen, own()?),
            (libc::SYS_setsockopt, own()?),
        ]),
        SeccompAction::Errno(0),
    )?;
    install(
        BTreeMap::from([(libc::SYS_accept, own()?), (libc::SYS_accept4, own()?)]),
        SeccompAction::Errno(libc::EAGAIN as u32),
    )?;
    let kinds = [libc::AF_INET, libc::AF_UNIX];
    let kinds = kinds.into_iter().map(|family| when(0, family as u64)).collect::<Result<Vec<_>, String>>()?;
    install(BTreeMap::from([(libc::SYS_socket, kinds)]), SeccompAction::Trap)
}

fn text(e: seccompiler::BackendError) -> String {
    format!("seccomp: {e}")
}

/// Returns a descriptor without events, which stays open.
fn descriptor() -> Result<RawFd, String> {
    // SAFETY: the call takes plain numbers.
    match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
        -1 => Err(format!("eventfd: {}", std::io::Error::last_os_error())),
        descriptor => Ok(descriptor),
    }
}

/// Answers a refused `socket` with a stand-in.
extern "C" fn on_socket(_: libc::c_int, facts: *const libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes valid facts and this thread's registers, of the type for a handler
    // with `SA_SIGINFO`.
    let (facts, context) = unsafe { (&*facts, &mut *context.cast::<libc::ucontext_t>()) };
    if facts.si_code != SYS_SECCOMP {
        return;
    }
    let kind = if first_argument(context) == libc::AF_INET { &STREAM } else { &DATAGRAM };
    answer(
        context,
        match kind.swap(-1, Ordering::SeqCst) {
            -1 => -i64::from(libc::EPERM),
            descriptor => descriptor.into(),
        },
    );
}

#[cfg(target_arch = "x86_64")]
fn first_argument(context: &libc::ucontext_t) -> libc::c_int {
    context.uc_mcontext.gregs[libc::REG_RDI as usize] as libc::c_int
}

#[cfg(target_arch = "x86_64")]
fn answer(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

#[cfg(target_arch = "aarch64")]
fn first_argument(context: &libc::ucontext_t) -> libc::c_int {
    context.uc_mcontext.regs[0] as libc::c_int
}

#[cfg(target_arch = "aarch64")]
fn answer(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.regs[0] = result as u64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containment::{Calls, before_client, landlock};

    #[test]
    fn a_debugger_gets_sockets_that_lead_nowhere() {
        const ALONE: &str = "DEBUGGER_TEST";
        if std::env::var_os(ALONE).is_none() {
            let test = "containment::debugger::tests::a_debugger_gets_sockets_that_lead_nowhere";
            for isolation in ["off", "require"] {
                let done = std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", test, "--nocapture"])
                    .env(ALONE, isolation)
                    .output()
                    .unwrap();
                let said = String::from_utf8_lossy(&done.stdout);
                assert!(done.status.success() && said.contains("contained"), "{isolation}: {done:?}");
            }
            return;
        }
        if std::env::var_os(ALONE).is_some_and(|isolation| isolation == "require") {
            before_client(Calls::Own, landlock()).unwrap();
        }
        give_stand_ins().unwrap();
        let error = || std::io::Error::last_os_error().raw_os_error();
        // A thread of its own, as the debugger has.
        let debugger = std::thread::spawn(move || {
            // SAFETY: plain system calls; addresses and options have the stated lengths.
            unsafe {
                let one: libc::c_int = 1;
                let option = std::ptr::from_ref(&one).cast();
                let address: libc::sockaddr_in = std::mem::zeroed();
                let (at, len) = (std::ptr::from_ref(&address).cast(), size_of_val(&address) as u32);
                let stream = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                let datagram = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0);
                assert!(stream >= 0 && datagram >= 0 && stream != datagram, "{stream} {datagram}");
                assert_eq!(libc::setsockopt(stream, libc::SOL_TCP, libc::TCP_NODELAY, option, 4), 0);
                for socket in [stream, datagram] {
                    assert_eq!((libc::bind(socket, at, len), libc::listen(socket, 128)), (0, 0));
                    let null = std::ptr::null_mut();
                    assert_eq!((libc::accept(socket, null, null.cast()), error()), (-1, Some(libc::EAGAIN)));
                    let mut poll = libc::pollfd { fd: socket, events: libc::POLLIN, revents: 0 };
                    assert_eq!(libc::poll(&mut poll, 1, 0), 0, "no event");
                }
                for family in [libc::AF_INET, libc::AF_UNIX] {
                    assert_eq!(
                        (libc::socket(family, libc::SOCK_STREAM, 0), error()),
                        (-1, Some(libc::EPERM))
                    );
                }
            }
        });
        debugger.join().unwrap();
        // Other sockets keep their options.
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        nix::sys::socket::setsockopt(&one, nix::sys::socket::sockopt::SndBuf, &65_536).unwrap();
        println!("contained");
        std::process::exit(0);
    }
}
