//! Memory, and tokens of all objects, that processes of one lease share.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use gpusession_proto::frame::Reader;
use gpusession_proto::share::{Kind, Name, Token};
use gpusession_proto::supervise::{Charge, FromWorker, Unshared};

use crate::answer::{Answer, Done, Failure};
use crate::driver::{POSIX_FD, Status, check, status};
use crate::objects::known::{self, Owner};
use crate::objects::memory::{Allocation, lock};
use crate::objects::pools::{ExportData, seal};
use crate::objects::shares::{Object, Source};
use crate::session::Session;

/// Takes a descriptor that the driver has just created.
fn owned(raw: i32) -> Result<OwnedFd, Status> {
    // SAFETY: the caller passes a new descriptor, or -1.
    (raw >= 0).then(|| unsafe { OwnedFd::from_raw_fd(raw) }).ok_or(status::INVALID_VALUE)
}

/// Returns the descriptor of an object.
pub fn descriptor(session: &Session, source: &Source) -> Result<OwnedFd, Status> {
    let call = &session.driver.call;
    let export = |handle: u64| {
        let mut raw: i32 = -1;
        // SAFETY: for this handle type the driver writes a descriptor, which has 4 bytes.
        check(unsafe { (call.cuMemExportToShareableHandle)((&raw mut raw).cast(), handle, POSIX_FD, 0) })?;
        owned(raw)
    };
    match *source {
        Source::Counters(ref page) => page.descriptor(),
        // A context is current for pools, as it is where the program calls.
        Source::Pool(pool) => session.contexts.within_first(session.driver, || {
            let mut raw: i32 = -1;
            // SAFETY: as above.
            check(unsafe {
                (call.cuMemPoolExportToShareableHandle)((&raw mut raw).cast(), pool, POSIX_FD, 0)
            })?;
            owned(raw)
        }),
        Source::Pointer(address) => {
            let mut data: ExportData = [0; 64];
            session.contexts.within_first(session.driver, || {
                // SAFETY: the out pointer is to memory of the structure's size.
                check(unsafe { (call.cuMemPoolExportPointer)((&raw mut data).cast(), address) })
            })?;
            seal(&data).map_err(|_| status::OPERATING_SYSTEM)
        }
        Source::Handle(handle) => export(handle),
        Source::Mapped(address) => {
            let mut handle = 0;
            // SAFETY: the out pointer is valid; the driver checks the address.
            check(unsafe { (call.cuMemRetainAllocationHandle)(&mut handle, address as *mut c_void) })?;
            let exported = export(handle);
            // SAFETY: the handle was just retained.
            unsafe { (call.cuMemRelease)(handle) };
            exported
        }
    }
}

/// `SHARE_EXPORT`: the driver's handle of physical memory; answers a token.
pub fn export(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let handle = r.word()?;
    session.shares.possible()?;
    let mut state = session.allocations.lock();
    let physical = state.physical.get_mut(&handle).filter(|p| p.handles > 0).ok_or(status::INVALID_VALUE)?;
    let source = Source::Handle(handle);
    // The driver judges whether this memory may be shared.
    descriptor(session, &source)?;
    let charge = Charge { device: physical.device, bytes: physical.bytes };
    let name = session.shares.name(&mut physical.share, Kind::Memory, source, charge);
    let name = name.ok_or(status::OPERATING_SYSTEM)?;
    answer.bytes(&Token { name, offset: 0, size: physical.bytes }.bytes());
    Ok(())
}

/// `SHARE_ADDRESS`: an address of `ALLOC`'s memory; answers a token.
///
/// The token's offset is that of the address in its mapping.
pub fn export_address(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let address = r.word()?;
    session.shares.possible()?;
    let mut allocations = lock(&session.memory.allocations);
    let found = allocations.range_mut(..=address).next_back().filter(|(base, a)| address - **base < a.size);
    let (&base, allocation) = found.filter(|(_, a)| a.imported.is_none()).ok_or(status::INVALID_VALUE)?;
    let source = Source::Mapped(base);
    if allocation.share.is_none() {
        descriptor(session, &source)?;
    }
    let charge = Charge { device: allocation.device, bytes: allocation.size };
    let name = session.shares.name(&mut allocation.share, Kind::Memory, source, charge);
    let name = name.ok_or(status::OPERATING_SYSTEM)?;
    answer.bytes(&Token { name, offset: address - base, size: allocation.size }.bytes());
    Ok(())
}

/// Gets the descriptor of another worker's object by a token, which the frame contains.
///
/// The object has one import more.
pub fn request(session: &Session, r: &mut Reader<'_>, kind: Kind) -> Result<(Token, OwnedFd), Failure> {
    session.shares.possible()?;
    let token = r.bytes()?.try_into().ok().and_then(Token::parse);
    let token = token.filter(|token| token.name.kind == kind).ok_or(status::INVALID_VALUE)?;
    let given = session.shares.request(token.name).map_err(|refused| match refused {
        Unshared::Elsewhere => status::NOT_SUPPORTED,
        // As the driver answers for a descriptor of another kind (H100, driver 580).
        Unshared::Unknown => status::UNKNOWN,
        Unshared::Busy => status::OPERATING_SYSTEM,
        Unshared::Driver(code) => code,
    })?;
    Ok((token, given))
}

/// Gets another worker's memory; returns the driver's handle and the object with its device.
///
/// The object has one import more.
fn fetch(session: &Session, r: &mut Reader<'_>) -> Result<(u64, Object, u32), Failure> {
    let (token, given) = request(session, r, Kind::Memory)?;
    let object = (token.name.worker, token.name.object);
    let mut handle = 0;
    let raw = given.as_raw_fd() as usize as *mut c_void;
    // SAFETY: for this handle type the pointer is the number of a descriptor, which stays open
    // during the call; the out pointer is valid.
    check(unsafe { (session.driver.call.cuMemImportFromShareableHandle)(&mut handle, raw, POSIX_FD) })
        .inspect_err(|_| session.shares.dropped(&mut session.shares.exports(), object))?;
    let device = session.shares.exports().charge_of(&object).device;
    Ok((handle, object, device))
}

/// `SHARE_IMPORT`: a token; answers the driver's handle of the memory.
pub fn import(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (handle, object, device) = fetch(session, r)?;
    if !session.allocations.lock().imported(handle, device, object) {
        // Its record stands for one import.
        session.shares.dropped(&mut session.shares.exports(), object);
    }
    session.known.note(known::Kind::Memory, handle, Owner::default());
    answer.word(handle);
    Ok(())
}

/// `SHARE_OPEN`: address and size of a mapping, a token; maps the memory there.
pub fn open(session: &Session, r: &mut Reader<'_>) -> Done {
    let (address, size) = (r.word()?, r.word()?);
    super::memory::within_window(session, address, size)?;
    let (handle, object, device) = fetch(session, r)?;
    let placed = {
        let reach: Vec<_> = session.contexts.reached_by(device).collect();
        super::memory::map(session.driver, address, size, handle, &reach)
    };
    placed.inspect_err(|_| session.shares.dropped(&mut session.shares.exports(), object))?;
    let allocation = Allocation { size, device, share: None, imported: Some(object) };
    lock(&session.memory.allocations).insert(address, allocation);
    Ok(())
}

/// Answers the supervisor's request for an object of this worker.
pub fn give(session: &Session, number: u64, name: &Name) {
    // Locked until the answer is sent, so that the end of the object is reported after it.
    let mut exports = session.shares.exports();
    let given = exports
        .give(name)
        .ok_or(Unshared::Unknown)
        .and_then(|(source, charge)| Ok((charge, descriptor(session, &source).map_err(Unshared::Driver)?)));
    let beside = given.as_ref().ok().map(|(_, descriptor)| descriptor.as_fd());
    let given = given.as_ref().map(|(charge, _)| *charge).map_err(|why| *why);
    session.supervisor().report_with(&FromWorker::ShareGiven { number, given }, beside);
}
