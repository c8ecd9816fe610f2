//! The driver's linker.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::Reader;
use gpusession_proto::status::IMAGE_MISSING;

use super::module::{hash, name};
use crate::answer::{Answer, Done};
use crate::driver::{check, status};
use crate::handles::Object;
use crate::objects::jit::Options;
use crate::objects::links::Link;
use crate::session::Session;

/// Longest part of a linked image in one answer, in bytes.
const PART_BYTES: usize = 1 << 20;
/// Zeros behind an input: the driver looks for the terminator of text.
const TERMINATOR: [u8; 8] = [0; 8];

fn lock(link: &Arc<Mutex<Link>>) -> MutexGuard<'_, Link> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `LINK_CREATE`: new handle, JIT options.
pub fn create(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let mut options = Options::read(r)?;
    let mut state = std::ptr::null_mut();
    // SAFETY: both arrays have as many elements as stated, and live in the state as the logs do,
    // until it is destroyed.
    check(unsafe {
        (session.driver.call.cuLinkCreate_v2)(
            options.keys.len() as u32,
            options.keys.as_ptr(),
            options.values.as_mut_ptr(),
            &mut state,
        )
    })?;
    let link = Link { state: Object(state), options, image: None };
    Ok(session.links.put(handle, link).inspect_err(|_| {
        // SAFETY: a state that the driver made a moment ago, which no frame can name.
        unsafe { (session.driver.call.cuLinkDestroy)(state) };
    })?)
}

/// `LINK_ADD`: state, type, hash of the input, name, JIT options; answers the logs and the outputs
/// of the link's options.
pub fn add(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let link = session.links.get(r.word()?)?;
    let (kind, hash, name) = (r.word()? as i32, hash(r)?, name(r)?);
    let mut options = Options::read(r)?;
    let mut input = session.images.get(&hash).ok_or(IMAGE_MISSING)?.to_vec();
    let len = input.len();
    gpusession_image::check(&input).map_err(|_| status::INVALID_IMAGE)?;
    input.extend_from_slice(&TERMINATOR);
    let link = lock(&link);
    // SAFETY: a state of this worker; the input has `len` bytes, and the name ends in a zero.
    let added = check(unsafe {
        (session.driver.call.cuLinkAddData_v2)(
            link.state.0,
            kind,
            input.as_mut_ptr().cast(),
            len,
            name.as_ptr(),
            options.keys.len() as u32,
            options.keys.as_ptr(),
            options.values.as_mut_ptr(),
        )
    });
    link.options.logs(answer);
    link.options.outputs(answer);
    Ok(added?)
}

/// `LINK_COMPLETE`: state; answers the logs, the length of the linked image (0 after an error), and
/// the outputs of the link's options.
pub fn complete(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let link = session.links.get(r.word()?)?;
    let mut link = lock(&link);
    let (mut image, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: a state of this worker; the out pointers are valid.
    let linked = check(unsafe { (session.driver.call.cuLinkComplete)(link.state.0, &mut image, &mut len) });
    link.options.logs(answer);
    answer.word(len as u64);
    link.options.outputs(answer);
    linked?;
    link.image = (!image.is_null()).then_some((image as usize, len));
    Ok(())
}

/// `LINK_IMAGE`: state, offset; answers the next part of the linked image.
pub fn image(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (link, offset) = (session.links.get(r.word()?)?, r.word()? as usize);
    let link = lock(&link);
    let (address, len) = link.image.ok_or(status::INVALID_VALUE)?;
    let part = len.checked_sub(offset).ok_or(status::INVALID_VALUE)?.min(PART_BYTES);
    // SAFETY: the driver's image has `len` bytes and lives until the state is destroyed, which the
    // lock delays.
    answer.bytes(unsafe { std::slice::from_raw_parts((address + offset) as *const u8, part) });
    Ok(())
}

/// `LINK_DESTROY`: state.
pub fn destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let link = session.links.take(r.word()?)?;
    // SAFETY: a state of this worker that no later frame can name; the lock waits for other frames.
    Ok(check(unsafe { (session.driver.call.cuLinkDestroy)(lock(&link).state.0) })?)
}
