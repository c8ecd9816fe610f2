//! References to textures and surfaces, which CUDA had before their objects.

use gpusession_proto::frame::Reader;

use super::module::name;
use crate::answer::Done;
use crate::driver::{check, status};
use crate::handles::{Object, kind};
use crate::session::Session;

/// `REFERENCE_FIND`: new handle, whose kind states what it refers to; module, name.
pub fn find(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, parent) = (r.word()?, r.word()?);
    let name = name(r)?;
    let module = session.modules.get(parent)?.0;
    let call = &session.driver.call;
    let mut reference = std::ptr::null_mut();
    let (table, ask) = match kind::kind(handle) {
        kind::TEXREF => (&session.texrefs, call.cuModuleGetTexRef),
        kind::SURFREF => (&session.surfrefs, call.cuModuleGetSurfRef),
        _ => return Err(status::INVALID_HANDLE.into()),
    };
    // SAFETY: the out pointer is valid, the module belongs to this worker, the name ends in a zero.
    check(unsafe { ask(&mut reference, module, name.as_ptr()) })?;
    Ok(table.put(handle, (Object(reference), parent))?)
}

/// `TEXREF_CREATE`: new handle.
pub fn create(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let mut reference = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuTexRefCreate)(&mut reference) })?;
    Ok(session.texrefs.put(handle, (Object(reference), 0))?)
}

/// `TEXREF_DESTROY`: a reference that the client created; those of modules end with them.
pub fn destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let (reference, parent) = session.texrefs.get(handle)?;
    if parent != 0 {
        return Err(status::INVALID_VALUE.into());
    }
    session.texrefs.take(handle)?;
    // SAFETY: a reference of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuTexRefDestroy)(reference.0) })?)
}
