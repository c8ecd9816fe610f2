//! Legacy handles of memory and events.

use super::{out, stream};
use crate::driver::context::working;
use crate::driver::stream::{EVENTS, Event, EventState};
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, Result};
use crate::export;
use crate::ipc::{Bytes, Counter, Handle, Subject};
use crate::memory::Kind;
use crate::registry::handle;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// `CUipcMemHandle` or `CUipcEventHandle`, which calls pass by value.
#[repr(C)]
pub struct Passed(Bytes);

impl Passed {
    pub fn of(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_PEER_ACCESS: u32 = 1;

/// Address of opened memory, and how often it is open, by the number of its file.
static OPENED: Mutex<Option<HashMap<u64, (u64, u32)>>> = Mutex::new(None);

fn possible() -> Result {
    if config().export_memory { Ok(()) } else { Err(errors::NOT_SUPPORTED) }
}

fn parse(bytes: &Bytes, subject: Subject) -> Result<Handle> {
    let known = Handle::parse(bytes, subject).ok_or(INVALID_VALUE)?;
    // As a card answers: a process does not open its own (H100, driver 580).
    if known.is_own() { Err(INVALID_CONTEXT) } else { Ok(known) }
}

/// A handle that names no event has another error than one of no memory (H100, driver 580).
fn event_named(bytes: &Bytes) -> Result<Handle> {
    parse(bytes, Subject::Event).map_err(|e| if e == INVALID_VALUE { errors::MAP_FAILED } else { e })
}

fn open(bytes: &Bytes, flags: u32) -> Result<u64> {
    if flags != LAZY_PEER_ACCESS {
        return Err(INVALID_VALUE);
    }
    possible()?;
    let ctx = working()?;
    let known = parse(bytes, Subject::Memory)?;
    let space = &driver()?.space;
    let mut opened = OPENED.lock();
    let opened = opened.get_or_insert_default();
    if let Some((base, count)) = opened.get_mut(&known.number()) {
        *count += 1;
        return Ok(*base);
    }
    let file = known.open().ok_or(INVALID_VALUE)?;
    let base = space.open(&file, known.size, known.card, handle(&ctx))?.base;
    opened.insert(known.number(), (base, 1));
    Ok(base)
}

fn close(at: u64) -> Result {
    let ctx = working()?;
    let mut opened = OPENED.lock();
    let opened = opened.get_or_insert_default();
    let (&number, (_, count)) = opened.iter_mut().find(|(_, (base, _))| *base == at).ok_or(INVALID_VALUE)?;
    *count -= 1;
    if *count == 0 {
        opened.remove(&number);
        ctx.synchronize()?;
        driver()?.space.remove(at, |a| matches!(a.kind, Kind::Opened)).ok_or(INVALID_VALUE)?;
    }
    Ok(())
}

export! {
    fn cuIpcGetMemHandle(to: *mut Bytes, at: u64) {
        working()?;
        let d = driver()?;
        let a = d.space.find(at).filter(|a| matches!(a.kind, Kind::Device)).ok_or(INVALID_VALUE)?;
        possible()?;
        out(to, a.share(|file| Handle::new(Subject::Memory, file, a.size, d.device(a.device as i32)?.card))?.bytes())
    }

    fn cuIpcOpenMemHandle_v2(to: *mut u64, from: Passed, flags: u32) {
        out(to, open(&from.0, flags)?)
    }

    fn cuIpcOpenMemHandle(to: *mut u64, from: Passed, flags: u32) {
        out(to, open(&from.0, flags)?)
    }

    fn cuIpcCloseMemHandle(at: u64) {
        close(at)
    }

    fn cuIpcGetEventHandle(to: *mut Bytes, event: usize) {
        possible()?;
        let event = stream::event(event)?;
        let counter = event.shared.as_ref().filter(|counter| !counter.opened).ok_or(INVALID_HANDLE)?;
        out(to, counter.handle()?.bytes())
    }

    fn cuIpcOpenEventHandle(to: *mut usize, from: Passed) {
        let ctx = working()?;
        possible()?;
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        let shared = Arc::new(Counter::open(&event_named(&from.0)?)?);
        let state = Mutex::new(EventState::default());
        let flags = stream::DISABLE_TIMING | stream::INTERPROCESS;
        let event = Event { flags, context: handle(&ctx), device: ctx.device, shared: Some(shared), state };
        out(to, EVENTS.insert(Arc::new(event)))
    }
}
