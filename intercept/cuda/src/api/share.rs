//! Memory and events that other processes of the lease use, too.
//!
//! A descriptor that the program passes on is a sealed memory file with a token. The worker of the
//! process that imports it fetches the driver's own descriptor on the server.

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use gpusession_link::Reply;
use gpusession_proto::frame::op;
use gpusession_proto::handle;
use gpusession_proto::share::{self, Token};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::client::{Client, string, word};
use crate::entry::{
    INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, MAP_FAILED, NOT_SUPPORTED, OPERATING_SYSTEM, Result,
    UNKNOWN, alias, driver, give,
};
use crate::events::{self, DISABLE_TIMING, INTERPROCESS};
use crate::ranges::{self, Kind, Range};
use crate::window::GRANULE;
use crate::{clients, handles, streams, thread};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub const POSIX_FD: u32 = 1;

/// Returns the seals that forbid any change of a memory file.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE
}

/// Makes a descriptor of a token.
pub fn seal(token: &[u8; Token::LEN]) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"gpusession-memory", flags)?);
    file.write_all_at(token, 0)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
    Ok(file)
}

/// Reads the token of a descriptor of an object of this kind.
///
/// For any other descriptor, returns the driver's error (H100, driver 580).
pub fn unseal(descriptor: i32, kind: share::Kind) -> Result<[u8; Token::LEN]> {
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
        && Token::parse(&token).is_some_and(|token| token.name.kind == kind);
    if complete { Ok(token) } else { Err(UNKNOWN) }
}

/// Asks workers for the object of a token: the current context's, then those of other leases.
///
/// `ask` sends the request to one of them. Returns the client of the lease that has the object, and
/// the worker's reply.
pub fn import(ask: impl Fn(&'static Client) -> Result<Reply>) -> Result<(&'static Client, Reply)> {
    let first = clients::get()?;
    let others = clients::all()?.filter(|client| client.number != first.number);
    for client in std::iter::once(first).chain(others) {
        let reply = ask(client)?;
        if reply.status != NOT_SUPPORTED {
            client.check_status(reply.status)?;
            return Ok((client, reply));
        }
    }
    Err(elsewhere())
}

/// Prints why no worker of these leases has the object of a token, and returns the error.
pub fn elsewhere() -> i32 {
    crate::trace::why(
        "shared memory: not imported: the process that exported it has ended, or has a lease of another user \
         or on other GPUs; start both under one lease (GPUSESSION_LEASE)",
    );
    NOT_SUPPORTED
}

/// A legacy handle of memory or of an event, which is a token.
pub type Legacy = [u8; Token::LEN];

/// Legacy handles of allocations, by base address, with the allocation's number.
static KNOWN: Mutex<BTreeMap<u64, (u64, Legacy)>> = Mutex::new(BTreeMap::new());
/// Number of handles after which the library forgets all of them.
const MAX_KNOWN: usize = 4096;

/// Returns the legacy handle of an allocation, which stays the same while the allocation exists.
///
/// MPI libraries ask for it with each message.
fn legacy_of(range: &Range) -> Result<Legacy> {
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((id, legacy)) = known().get(&range.base)
        && *id == range.id
    {
        return Ok(*legacy);
    }
    let reply = clients::by_object(range.ctx)?.call(op::SHARE_ADDRESS, |w| w.word(range.base))?;
    let mut reader = reply.reader();
    let token = string(&mut reader)?.try_into().ok().and_then(Token::parse).ok_or(UNKNOWN)?;
    let legacy = Token { size: range.size, ..token }.bytes();
    let mut known = known();
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.insert(range.base, (range.id, legacy));
    Ok(legacy)
}

/// Returns the token of a legacy handle of this kind.
pub fn named(legacy: &Legacy, kind: share::Kind) -> Result<Token> {
    Token::parse(legacy).filter(|token| token.name.kind == kind).ok_or(INVALID_VALUE)
}

/// Returns an error for a legacy handle of this process.
///
/// As the driver answers (H100, driver 580): a process does not open its own memory.
fn not_own(token: &Token) -> Result {
    let own = clients::all()?.any(|client| client.link.worker() == token.name.worker);
    if own { Err(INVALID_CONTEXT) } else { Ok(()) }
}

/// Opens the event of a legacy handle and returns the program's handle of it.
fn open_event(legacy: &Legacy) -> Result<u64> {
    thread::context()?;
    // A handle that names nothing has the driver's error for events (H100, driver 580).
    not_own(&named(legacy, share::Kind::Event).map_err(|_| MAP_FAILED)?)?;
    streams::shares();
    let new = Cell::new(0);
    let opened = import(|client| {
        let event = client.mint(handle::EVENT);
        let reply = client.ask(op::SHARE_EVENT_OPEN, |w| {
            w.word(event);
            w.bytes(legacy);
        });
        match &reply {
            Ok(reply) if reply.status == 0 => new.set(event),
            _ => handles::retire(event),
        }
        reply
    });
    let (client, _) = opened.map_err(|status| if status == UNKNOWN { MAP_FAILED } else { status })?;
    events::add(client, new.get(), DISABLE_TIMING | INTERPROCESS);
    events::find(new.get())?.share();
    Ok(new.get())
}

/// A mapping of memory of another process, and its opened parts.
struct Opened {
    client: &'static Client,
    address: u64,
    size: u64,
    /// How often each part is open, by its address.
    parts: HashMap<u64, u32>,
}

/// Opened mappings, by the worker and the number of the memory.
static OPENED: Mutex<BTreeMap<([u8; 16], u64), Opened>> = Mutex::new(BTreeMap::new());

/// Maps the memory of a legacy handle at free addresses of its lease's window.
fn map(legacy: &Legacy, size: u64) -> Result<Opened> {
    let place = Cell::new(None);
    let opened = import(|client| {
        let (address, size) = client.window().allocate_whole(size)?;
        let reply = client.ask(op::SHARE_OPEN, |w| {
            w.word(address);
            w.word(size);
            w.bytes(legacy);
        });
        match &reply {
            Ok(reply) if reply.status == 0 => place.set(Some(address)),
            _ => client.window().refused(address, size),
        }
        reply
    });
    // A handle that names nothing is a wrong value here.
    let (client, _) = opened.map_err(|status| if status == UNKNOWN { INVALID_VALUE } else { status })?;
    let address = place.get().ok_or(UNKNOWN)?;
    Ok(Opened { client, address, size, parts: HashMap::new() })
}

/// Opens a legacy handle and returns the address; a part that is open already has one.
fn open(legacy: &Legacy) -> Result<u64> {
    let token = named(legacy, share::Kind::Memory)?;
    let end = token.offset.checked_add(token.size).filter(|_| token.size > 0).ok_or(INVALID_VALUE)?;
    let size = end.checked_next_multiple_of(GRANULE).ok_or(INVALID_VALUE)?;
    let ctx = thread::context()?;
    not_own(&token)?;
    streams::shares();
    let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let name = (token.name.worker, token.name.object);
    let opened = match all.entry(name) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => new.insert(map(legacy, size)?),
    };
    if end > opened.size {
        return Err(INVALID_VALUE);
    }
    let address = opened.address + token.offset;
    let count = opened.parts.entry(address).or_default();
    *count += 1;
    if *count == 1 {
        let owner = if opened.client.number == handle::server(ctx) { ctx } else { opened.client.primary(0) };
        ranges::add(address, token.size, Kind::Opened, owner);
    }
    Ok(address)
}

/// Closes an opened part; the last one ends the mapping.
fn close(address: u64) -> Result {
    let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = all.iter_mut().find(|(_, opened)| opened.parts.contains_key(&address));
    let (&name, opened) = found.ok_or(INVALID_VALUE)?;
    let count = opened.parts.get_mut(&address).ok_or(INVALID_VALUE)?;
    *count -= 1;
    if *count > 0 {
        return Ok(());
    }
    opened.parts.remove(&address);
    ranges::take(address, |kind| kind == Kind::Opened);
    if !opened.parts.is_empty() {
        return Ok(());
    }
    let Some(gone) = all.remove(&name) else { return Ok(()) };
    // Waits for the devices, as a free does.
    gone.client.call(op::FREE, |w| w.word(gone.address))?;
    gone.client.window().unmapped(gone.address, gone.size);
    Ok(())
}

/// `CUipcMemHandle` or `CUipcEventHandle`, which calls pass by value.
#[repr(C)]
pub struct Passed(Legacy);

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_PEER_ACCESS: u32 = 1;

driver! {
    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: u32, flags: u64) {
        let client = clients::by_object(handle).map_err(|_| INVALID_HANDLE)?;
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
        let token = unseal(shareable as usize as i32, share::Kind::Memory)?;
        streams::shares();
        let (client, reply) = import(|client| client.ask(op::SHARE_IMPORT, |w| w.bytes(&token)))?;
        give(handle, client.name(word(&mut reply.reader())?))
    }

    fn cuIpcGetMemHandle(legacy: *mut Legacy, address: u64) {
        clients::get()?;
        let range = ranges::find(address).filter(|r| r.kind == Kind::Device).ok_or(INVALID_VALUE)?;
        if legacy.is_null() {
            return Err(INVALID_VALUE);
        }
        streams::shares();
        give(legacy, legacy_of(&range)?)
    }

    fn cuIpcOpenMemHandle_v2(address: *mut u64, legacy: Passed, flags: u32) {
        clients::get()?;
        if address.is_null() || flags != LAZY_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        give(address, open(&legacy.0)?)
    }

    fn cuIpcGetEventHandle(legacy: *mut Legacy, event: *mut c_void) {
        clients::get()?;
        let event = events::find(event as u64)?;
        if legacy.is_null() {
            return Err(INVALID_VALUE);
        }
        if !event.is_interprocess() {
            return Err(INVALID_HANDLE);
        }
        streams::shares();
        event.share();
        let reply = event.client.call(op::SHARE_EVENT, |w| w.word(event.handle))?;
        let mut reader = reply.reader();
        give(legacy, string(&mut reader)?.try_into().map_err(|_| UNKNOWN)?)
    }

    fn cuIpcOpenEventHandle(event: *mut *mut c_void, legacy: Passed) {
        clients::get()?;
        if event.is_null() {
            return Err(INVALID_VALUE);
        }
        give(event, open_event(&legacy.0)? as *mut c_void)
    }

    fn cuIpcCloseMemHandle(address: u64) {
        clients::get()?;
        close(address)
    }
}

alias! {
    cuIpcOpenMemHandle = cuIpcOpenMemHandle_v2(address: *mut u64, legacy: Passed, flags: u32);
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

    fn unsealed(file: &impl AsRawFd) -> Result<[u8; Token::LEN]> {
        unseal(file.as_raw_fd(), Kind::Memory)
    }

    #[test]
    fn sealed_token_is_read_through_any_copy_of_its_descriptor() {
        let file = seal(&token()).unwrap();
        assert_eq!(unsealed(&file), Ok(token()));
        assert_eq!(unsealed(&file.try_clone().unwrap()), Ok(token()));
        assert_eq!(unseal(file.as_raw_fd(), Kind::Pool), Err(UNKNOWN), "memory is no pool");
        assert!(file.write_all_at(&[0], 0).is_err() && file.set_len(0).is_err(), "nobody changes it");
    }

    #[test]
    fn other_descriptors_are_none_of_ours() {
        let file = |contents: &[u8], wanted: SealFlag| {
            let file = File::from(memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap());
            file.write_all_at(contents, 0).unwrap();
            fcntl(&file, FcntlArg::F_ADD_SEALS(wanted)).unwrap();
            unsealed(&file)
        };
        assert_eq!(file(&token(), seals()), Ok(token()));
        assert_eq!(file(&token(), seals() - SealFlag::F_SEAL_WRITE), Err(UNKNOWN), "may still change");
        assert_eq!(file(&[0; Token::LEN], seals()), Err(UNKNOWN), "other contents");
        assert_eq!(file(&token()[..63], seals()), Err(UNKNOWN));
        assert_eq!(file(&[token(), token()].concat(), seals()), Err(UNKNOWN));
        let (pipe, _writer) = io::pipe().unwrap();
        assert_eq!(unsealed(&pipe), Err(UNKNOWN), "nothing waits for a pipe");
        let null = File::open("/dev/null").unwrap();
        assert_eq!((unsealed(&null), unseal(-1, Kind::Memory)), (Err(UNKNOWN), Err(UNKNOWN)));
    }
}
