//! Host memory of the client that the device sees.
//!
//! Each region has a mirror in the worker. The client's changes arrive as `WRITE_HOST`. The
//! device's changes return as `HOST_CHANGED` when the driver has synchronised.
//!
//! Regions have the client's numbers, so that the addresses of client and worker may differ.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError};

use gpusession_link::watched_memory;
use gpusession_proto::changes::{self, BLOCK, Words};
use gpusession_proto::frame::{Reader, mirror, op};
use gpusession_proto::supervise::FromWorker;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::answer::{Answer, Done, Failure};
use crate::driver::{Address, REGISTER_MAPPED, Status, check, status};
use crate::frame::Frame;
use crate::objects::block_hash::Hash;
use crate::objects::device_blocks::{Finder, Region};
use crate::objects::mirrors::{Backing, InHost, Inner, Mirror, Mirrors, Shadow};
use crate::ops::allocations;
use crate::session::Session;
use crate::watch;

const PAGE: usize = 4096;
/// Bytes that a thread compares under one lock: some ten microseconds.
const COMPARED_BYTES: usize = 64 * BLOCK;

impl Mirrors {
    /// Sends the device's changes to the client; call it after the driver has synchronised.
    ///
    /// With `in_callback` the driver waits for the caller and must not be called.
    pub fn write_back(&self, session: &Session, in_callback: bool) {
        self.write_back_host(&mut sender(session));
        if in_callback || self.known(session.activity.changes()) {
            return;
        }
        let (mut inner, mut out) = (self.lock(), Vec::new());
        inner.changed_on_devices(session, self, &mut out);
        if !out.is_empty() {
            session.replies.send_frames(out);
        }
    }

    /// Sends what a kernel that still runs has written to memory that the program watches.
    ///
    /// Returns `true` if there was a change. Without one it holds no other thread up.
    pub fn write_back_watched(&self, session: &Session) -> bool {
        let mut regions = self.in_host_memory();
        regions.retain(|region| region.watched);
        let changed = regions.iter().any(InHost::differs);
        if changed && let Some(_pass) = self.passes.begin(&self.passes.ticket()) {
            // It lacks the other regions, so that it serves no thread that has to send those.
            send_changes(&regions, &mut sender(session));
        }
        changed
    }

    /// Passes the changes of mirrors in host memory to `send`.
    fn write_back_host(&self, send: &mut dyn FnMut(u64, &[u8])) {
        let Some(pass) = self.passes.begin(&self.passes.ticket()) else { return };
        send_changes(&self.in_host_memory(), send);
        pass.end();
    }
}

/// Returns a function that sends changes of a region to the client.
fn sender(session: &Session) -> impl FnMut(u64, &[u8]) {
    |region, body| {
        session.replies.send_with(op::HOST_CHANGED, 0, 0, |w| {
            w.word(region);
            w.words(body);
        });
    }
}

impl InHost {
    /// Returns `true` if the memory has bytes that the client does not know.
    fn differs(&self) -> bool {
        for first in (0..).step_by(COMPARED_BYTES) {
            let shadow = self.shadow.lock();
            let end = shadow.len().min(first + COMPARED_BYTES);
            let Some(piece) = shadow.get(first..end).filter(|piece| !piece.is_empty()) else { break };
            // SAFETY: memory of that length lives while the shadow does, which this thread has
            // locked. A kernel that runs may change the bytes; the next call compares them again.
            if unsafe { watched_memory::differs(self.address + first, piece) } {
                return true;
            }
        }
        false
    }
}

/// Passes the changes of regions to `send`: long runs, then the words.
///
/// So a program that sees a kernel's flag sees the data, too, which the kernel wrote before. The
/// caller has a pass.
fn send_changes(regions: &[InHost], send: &mut dyn FnMut(u64, &[u8])) {
    let Ok(words) = Words::collected(|words, again| {
        for InHost { region, address, shadow, .. } in regions.iter().filter(|r| !again || !r.managed) {
            for first in (0..).step_by(COMPARED_BYTES) {
                // A thread that writes other bytes does not wait.
                let mut shadow = shadow.lock();
                let end = shadow.len().min(first + COMPARED_BYTES);
                let Some(piece) = shadow.get_mut(first..end).filter(|piece| !piece.is_empty()) else {
                    break;
                };
                // SAFETY: memory of that length lives while the shadow does.
                unsafe { compare((*region, *address), first, piece, words, send) };
            }
        }
        Ok::<_, Infallible>(())
    });
    for InHost { region, shadow, .. } in regions {
        words.forget_late(*region, &mut shadow.lock());
    }
    for (id, places) in words.in_order() {
        let Some(InHost { shadow, .. }) = regions.iter().find(|r| r.region == id) else { continue };
        let mut body = Vec::new();
        changes::push_places(&mut body, &shadow.lock(), &places);
        if !body.is_empty() {
            send(id, &body);
        }
    }
}

/// Passes the changes of a piece of memory in the host to `send`, except words; its shadow gets
/// all.
///
/// # Safety
/// As many bytes as `shadow` has are readable from `first` behind `address`.
unsafe fn compare(
    (region, address): (u64, usize),
    first: usize,
    shadow: &mut [u8],
    words: &mut Words,
    send: &mut dyn FnMut(u64, &[u8]),
) {
    let mut body = Vec::new();
    for (i, old) in shadow.chunks_mut(BLOCK).enumerate() {
        let at = first + i * BLOCK;
        let (address, offset) = (address + at, at as u64);
        // SAFETY: by the caller's promise. A kernel that still runs may change the bytes; the next
        // call compares them again.
        if unsafe { watched_memory::differs(address, old) } {
            let mut copy = [0; BLOCK];
            let new = &mut copy[..old.len()];
            // SAFETY: as above.
            unsafe { watched_memory::read(address, new) };
            words.push_differing(&mut body, &changes::Block { region, address, offset, old, new });
            old.copy_from_slice(new);
        }
    }
    if !body.is_empty() {
        send(region, &body);
    }
}

impl Inner {
    /// Appends the changes of device memory to frames.
    fn changed_on_devices(&mut self, session: &Session, mirrors: &Mirrors, out: &mut Vec<u8>) {
        let Ok(keys) = mirrors.keys() else { return };
        for (&device, finder) in &mut self.finders {
            let mut regions: Vec<_> = self
                .mirrors
                .iter_mut()
                .filter_map(|(&id, mirror)| match &mut mirror.backing {
                    Backing::Device { device: on, blocks } if *on == device => {
                        Some(Region { id, address: mirror.address, len: mirror.len, blocks })
                    }
                    _ => None,
                })
                .collect();
            if regions.is_empty() {
                continue;
            }
            let mut changed = Changed { session, out, region: 0, body: Vec::new() };
            // A context that no longer copies has had an error, which the program receives
            // elsewhere.
            let _ = session.contexts.within_worker_context(session.driver, device, |stream| {
                finder.find(session.driver, keys, stream, &mut regions, |region, offset, bytes| {
                    if region != changed.region {
                        changed.flush_beyond(0);
                        changed.region = region;
                    }
                    changes::push(&mut changed.body, offset, bytes);
                    changed.flush_beyond(changes::FRAME);
                })
            });
            changed.flush_beyond(0);
        }
    }
}

/// Changes of one region on their way into frames.
struct Changed<'a> {
    session: &'a Session,
    out: &'a mut Vec<u8>,
    region: u64,
    body: Vec<u8>,
}

impl Changed<'_> {
    fn flush_beyond(&mut self, bytes: usize) {
        if self.body.len() > bytes {
            self.session.replies.append(self.out, op::HOST_CHANGED, 0, 0, |w| {
                w.word(self.region);
                w.words(&self.body);
            });
            self.body.clear();
        }
    }
}

/// `MIRROR_HOST`: region, kind, address, length; answers the device's address.
///
/// The client assumes zeros, so the worker sends it the present content of managed memory.
pub fn mirror(session: &Arc<Session>, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (region, kind, base, len) = (r.word()?, r.word()?, r.word()? as usize, r.word()? as usize);
    let fits = base.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE)).is_some();
    if len == 0 || base == 0 || !fits {
        return Err(status::INVALID_VALUE.into());
    }
    let device = match kind {
        // Without the lock: the driver may wait for a host function, whose callback takes the lock.
        mirror::DEVICE => {
            let (_, device) = session.contexts.get(frame.header.ctx.get())?;
            allocations::open_worker_context(session, device)?;
            open_finder(session, device)?;
            device
        }
        _ => 0,
    };
    let mut inner = session.mirrors.lock();
    if inner.mirrors.contains_key(&region) {
        return Err(status::INVALID_VALUE.into());
    }
    let charge = match kind {
        mirror::ANYWHERE | mirror::SAME | mirror::WATCHED => 2 * len as u64,
        mirror::MANAGED => len as u64,
        mirror::DEVICE => (len.div_ceil(BLOCK) * size_of::<Hash>()) as u64,
        _ => return Err(status::INVALID_VALUE.into()),
    };
    if charge > session.mirrors.limit - inner.charged {
        session.supervisor().report(&FromWorker::StagingFull { bytes: inner.charged.saturating_add(charge) });
        return Err(status::OUT_OF_MEMORY.into());
    }
    let (mirror, address) = match kind {
        mirror::MANAGED => {
            if inner.managed.get(&(base as Address)).is_none_or(|(size, _)| *size != len as u64) {
                return Err(status::INVALID_VALUE.into());
            }
            let backing = Backing::Managed { shadow: Shadow::new(len) };
            (Mirror { address: base, len, charge, backing }, base as Address)
        }
        mirror::DEVICE => {
            if !session.memory.contains(base as Address, len as u64) {
                return Err(status::INVALID_VALUE.into());
            }
            // Without the lock, as above. The hashes count from now on.
            inner.charged += charge;
            drop(inner);
            let cleared = session.contexts.within_worker_context(session.driver, device, |stream| {
                let call = &session.driver.call;
                // SAFETY: device memory and a stream of this worker.
                check(unsafe { (call.cuMemsetD8Async)(base as Address, 0, len, stream) })?;
                // SAFETY: a stream of this worker.
                check(unsafe { (call.cuStreamSynchronize)(stream) })
            });
            inner = session.mirrors.lock();
            inner.charged -= charge;
            cleared?;
            let blocks = vec![session.mirrors.keys()?.hash(&[0; BLOCK]); len.div_ceil(BLOCK)];
            let backing = Backing::Device { device, blocks };
            (Mirror { address: base, len, charge, backing }, base as Address)
        }
        _ => {
            // Without the lock, as in `unmirror`. The memory counts from now on.
            inner.charged += charge;
            drop(inner);
            let made = own(session, base, len, charge, kind);
            inner = session.mirrors.lock();
            inner.charged -= charge;
            made?
        }
    };
    if inner.mirrors.contains_key(&region) {
        // Another frame has used the number meanwhile.
        drop(inner);
        remove(session, mirror);
        return Err(status::INVALID_VALUE.into());
    }
    inner.charged += charge;
    inner.mirrors.insert(region, mirror);
    drop(inner);
    answer.word(address);
    match kind {
        mirror::MANAGED => session.mirrors.write_back(session, false),
        mirror::WATCHED => watch::start(session),
        _ => {}
    }
    Ok(())
}

/// Opens what finds changes of a device's memory, once.
fn open_finder(session: &Session, device: u32) -> Result<(), Status> {
    let _opening = session.mirrors.opening.lock().unwrap_or_else(PoisonError::into_inner);
    if session.mirrors.lock().finders.contains_key(&device) {
        return Ok(());
    }
    let under_mps = session.contexts.under_mps(session.driver);
    let keys = session.mirrors.keys()?;
    let mut finder = None;
    session.contexts.within_worker_context(session.driver, device, |_| {
        finder = Some(Finder::open(session.driver, keys, under_mps)?);
        Ok(())
    })?;
    session.mirrors.lock().finders.extend(finder.map(|finder| (device, finder)));
    Ok(())
}

/// Maps memory for a mirror, at the client's own address or at any other.
///
/// The offset within a page is always the client's.
fn own(
    session: &Session,
    base: usize,
    len: usize,
    charge: u64,
    kind: u64,
) -> Result<(Mirror, Address), Status> {
    let start = base & !(PAGE - 1);
    let mapped = (base + len).next_multiple_of(PAGE) - start;
    let length = NonZeroUsize::new(mapped).ok_or(status::INVALID_VALUE)?;
    let same = kind != mirror::ANYWHERE;
    let (hint, fixed) = match same {
        true => (NonZeroUsize::new(start), MapFlags::MAP_FIXED_NOREPLACE),
        false => (None, MapFlags::empty()),
    };
    if same && hint.is_none() {
        return Err(status::INVALID_VALUE);
    }
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping of this process.
    let mapping = unsafe { mmap_anonymous(hint, length, prot, MapFlags::MAP_PRIVATE | fixed) }
        .map_err(|_| status::OUT_OF_MEMORY)?;
    let call = &session.driver.call;
    let mut device = 0;
    // SAFETY: just mapped, and unmapped only by `remove`.
    let registered = check(unsafe { (call.cuMemHostRegister_v2)(mapping.as_ptr(), mapped, REGISTER_MAPPED) });
    let known = registered.and_then(|()| {
        // SAFETY: just registered; the out pointer is valid.
        check(unsafe { (call.cuMemHostGetDevicePointer_v2)(&mut device, mapping.as_ptr(), 0) })
    });
    let within = base - start;
    let address = mapping.as_ptr() as usize + within;
    let backing =
        Backing::Own { mapping, mapped, watched: kind == mirror::WATCHED, shadow: Shadow::new(len) };
    let mirror = Mirror { address, len, charge, backing };
    if let Err(error) = known {
        remove(session, mirror);
        return Err(error);
    }
    Ok((mirror, device + within as Address))
}

fn remove(session: &Session, mirror: Mirror) {
    if let Backing::Managed { shadow } = &mirror.backing {
        // The memory may end right after this.
        shadow.discard();
    }
    if let Backing::Own { mapping, mapped, shadow, .. } = mirror.backing {
        shadow.discard();
        // SAFETY: mapped by `own`; the client has synchronised before. The driver refuses memory
        // that was never registered.
        unsafe {
            (session.driver.call.cuMemHostUnregister)(mapping.as_ptr());
            let _ = munmap(mapping, mapped);
        }
    }
}

/// `UNMIRROR_HOST`: region.
pub fn unmirror(session: &Session, r: &mut Reader<'_>) -> Done {
    let region = r.word()?;
    let mirror = {
        let mut inner = session.mirrors.lock();
        let mirror = inner.mirrors.remove(&region).ok_or(status::INVALID_VALUE)?;
        inner.charged -= mirror.charge;
        mirror
    };
    // Without the lock: the driver may wait for a host function, whose callback takes the lock.
    remove(session, mirror);
    Ok(())
}

/// `WRITE_HOST`: region, the client's changes (in device memory: whole blocks).
pub fn write_host(session: &Session, r: &mut Reader<'_>) -> Done {
    let region = r.word()?;
    let mut inner = session.mirrors.lock();
    let Mirror { address, len, backing, .. } = inner.mirrors.get_mut(&region).ok_or(status::INVALID_VALUE)?;
    let mut parts = Vec::new();
    changes::read(r, |offset, bytes| parts.push((offset as usize, bytes)))?;
    for (offset, bytes) in &parts {
        if bytes.len() > *len || *offset > *len - bytes.len() {
            return Err(status::INVALID_VALUE.into());
        }
    }
    match backing {
        Backing::Own { shadow, .. } | Backing::Managed { shadow } => {
            let (address, shadow) = (*address, shadow.clone());
            drop(inner);
            for (offset, bytes) in parts {
                let mut shadow = shadow.lock();
                let known = shadow.get_mut(offset..offset + bytes.len()).ok_or(status::INVALID_VALUE)?;
                known.copy_from_slice(bytes);
                // SAFETY: the memory lives while its shadow has these bytes; the device may read it
                // at the same time, as on a local card.
                unsafe { watched_memory::write(address + offset, bytes) };
            }
            Ok(())
        }
        Backing::Device { device, blocks } => {
            let whole = |(offset, bytes): &(usize, &[u8])| {
                let ends = bytes.len().is_multiple_of(BLOCK) || offset + bytes.len() == *len;
                offset.is_multiple_of(BLOCK) && ends
            };
            if !parts.iter().all(whole) {
                return Err(Failure::Status(status::INVALID_VALUE));
            }
            let keys = session.mirrors.keys()?;
            let written = session.contexts.within_worker_context(session.driver, *device, |stream| {
                let call = &session.driver.call;
                for (offset, bytes) in &parts {
                    let target = (*address + offset) as Address;
                    // SAFETY: the bytes live until the stream is synchronised; all parts lie within
                    // the mirror.
                    check(unsafe {
                        (call.cuMemcpyHtoDAsync_v2)(target, bytes.as_ptr().cast(), bytes.len(), stream)
                    })?;
                    for (block, known) in bytes.chunks(BLOCK).zip(&mut blocks[offset / BLOCK..]) {
                        *known = keys.hash(block);
                    }
                }
                // SAFETY: a stream of this worker.
                check(unsafe { (call.cuStreamSynchronize)(stream) })
            });
            Ok(written?)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn kernels_flag_goes_back_after_its_data_also_if_it_writes_meanwhile() {
        let mirrors = Mirrors::new(1 << 20);
        // The last one has the flags, 1 and 2.
        let mut memory = [vec![0u64; BLOCK / 8], vec![0; BLOCK / 8]];
        let addresses = [0, 1].map(|i| memory[i].as_mut_ptr() as usize);
        for (id, address) in (0..).zip(addresses) {
            let shadow = Shadow::new(BLOCK);
            let backing = Backing::Own { mapping: NonNull::dangling(), mapped: 0, watched: true, shadow };
            mirrors.lock().mirrors.insert(id, Mirror { address, len: BLOCK, charge: 0, backing });
        }
        let write = |region: usize, word: usize, value: u64| {
            let at = (addresses[region] + 8 * word) as *mut u64;
            // SAFETY: inside the memory, which only this thread uses.
            unsafe { at.write_volatile(value) };
        };
        (0..20).for_each(|word| write(0, word, u64::MAX));
        write(1, 100, 1);
        let mut sent = Vec::new();
        mirrors.write_back_host(&mut |region, body| {
            if sent.is_empty() {
                // The thread has read the first region, and not the flags.
                (100..120).for_each(|word| write(0, word, u64::MAX));
                write(0, 200, 9);
                write(1, 200, 1);
            }
            let part = |offset: u64, bytes: &[u8]| sent.push((region, offset / 8, bytes.len()));
            changes::read(&mut Reader::new(body), part).unwrap();
        });
        assert_eq!(sent, [(0, 0, 160), (0, 100, 160), (0, 200, 4), (1, 100, 4), (1, 200, 4)]);
        sent.clear();
        mirrors.write_back_host(&mut |region, _| sent.push((region, 0, 0)));
        assert!(sent.is_empty(), "the client knows all");
    }
}
