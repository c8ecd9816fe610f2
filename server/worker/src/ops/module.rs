//! Modules, libraries, kernels and their attributes.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use gpusession_image::Kind;
use gpusession_proto::frame::Reader;
use gpusession_proto::handle::{CTX, make};
use gpusession_proto::status::IMAGE_MISSING;

use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{Handle, Status, check, status};
use crate::executor::Executor;
use crate::frame::Frame;
use crate::handles::Object;
use crate::objects::Func;
use crate::objects::jit::Options;
use crate::session::Session;

/// Number of function attributes (`CU_FUNC_ATTRIBUTE_*`, from 0) sent with a function.
const ATTRIBUTES: i32 = 16;
const MAX_PARAMS: usize = 4096;
pub fn hash(r: &mut Reader<'_>) -> Result<[u8; 32], Failure> {
    r.bytes()?.try_into().map_err(|_| Failure::Status(status::INVALID_VALUE))
}

pub fn name(r: &mut Reader<'_>) -> Result<CString, Failure> {
    CString::new(r.bytes()?).map_err(|_| Failure::Status(status::INVALID_VALUE))
}

/// `IMAGE_HAVE`: hash; answers whether the server has the image.
pub fn has_image(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    answer.word(u64::from(session.images.get(&hash(r)?).is_some()));
    Ok(())
}

/// `IMAGE_DATA`: hash, total length, the next piece.
pub fn data(session: &Session, r: &mut Reader<'_>) -> Done {
    let (hash, total) = (hash(r)?, r.word()?);
    session
        .images
        .add(hash, total, r.bytes()?)
        .map(|_| ())
        .map_err(|()| Failure::Status(status::INVALID_VALUE))
}

/// Refuses an image that a driver would read beyond its end.
pub fn checked(image: &[u8]) -> Result<(), Status> {
    match gpusession_image::check(image) {
        Ok(Kind::Text) if image.last() != Some(&0) => Err(status::INVALID_IMAGE),
        Ok(_) => Ok(()),
        Err(_) => Err(status::INVALID_IMAGE),
    }
}

/// A request to load an image that this worker has.
struct Load {
    handle: u64,
    hash: [u8; 32],
    options: Options,
    /// The program's handles for functions.
    functions: Vec<u64>,
    image: Arc<Vec<u8>>,
}

impl Load {
    /// Reads new handle, hash, JIT options and handles for functions; counts the image's memory.
    fn read(session: &Session, frame: &Frame, r: &mut Reader<'_>) -> Result<Self, Failure> {
        let (handle, hash) = (r.word()?, hash(r)?);
        let (options, functions) = (Options::read(r)?, handles(r)?);
        let image = session.images.get(&hash).ok_or(IMAGE_MISSING)?;
        checked(&image)?;
        session.allocations.image(session, frame, handle, &image)?;
        Ok(Self { handle, hash, options, functions, image })
    }

    /// Answers the logs and the options' outputs after the driver's word, which it returns.
    fn loaded(&self, session: &Session, loaded: Result<(), Status>, answer: &mut Answer) -> Done {
        self.options.logs(answer);
        self.options.outputs(answer);
        loaded.inspect_err(|_| session.allocations.drop_object(session, self.handle))?;
        session.images.accepted(&self.hash, &self.image);
        Ok(())
    }
}

/// `MODULE_LOAD`: new handle, hash, JIT options, handles for functions; answers the logs, the
/// options' outputs, and functions.
pub fn load_module(
    session: &Session,
    executor: &Executor,
    frame: &Frame,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let mut load = Load::read(session, frame, r)?;
    let mut module = std::ptr::null_mut();
    // SAFETY: `checked` found all that the image's headers name inside it, and the terminator of
    // text. The driver reads as many options as `keys` has.
    let loaded = check(unsafe {
        (session.driver.call.cuModuleLoadDataEx)(
            &mut module,
            load.image.as_ptr().cast(),
            load.options.keys.len() as u32,
            load.options.keys.as_ptr(),
            load.options.values.as_mut_ptr(),
        )
    });
    load.loaded(session, loaded, answer)?;
    session.modules.put(load.handle, Object(module))?;
    describe_all(session, executor, load.handle, false, &load.functions, answer)
}

/// `LIBRARY_LOAD`: new handle, hash, JIT options, handles for kernels; answers the logs, the
/// options' outputs, and kernels.
pub fn load_library(
    session: &Session,
    executor: &Executor,
    frame: &Frame,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let mut load = Load::read(session, frame, r)?;
    let mut library = std::ptr::null_mut();
    // SAFETY: as in `load_module`.
    let loaded = check(unsafe {
        (session.driver.call.cuLibraryLoadData)(
            &mut library,
            load.image.as_ptr().cast(),
            load.options.keys.as_ptr(),
            load.options.values.as_mut_ptr(),
            load.options.keys.len() as u32,
            std::ptr::null(),
            std::ptr::null(),
            0,
        )
    });
    load.loaded(session, loaded, answer)?;
    session.libraries.put(load.handle, Object(library))?;
    describe_all(session, executor, load.handle, true, &load.functions, answer)
}

/// Reads the handles for functions of a load; an earlier release sends none.
fn handles(r: &mut Reader<'_>) -> Result<Vec<u64>, Failure> {
    /// Most functions that a load describes.
    const MAX_DESCRIBED: usize = 64;
    if r.is_empty() {
        return Ok(Vec::new());
    }
    let count = bounded(r.word()?, MAX_DESCRIBED)?;
    (0..count).map(|_| Ok(r.word()?)).collect()
}

/// Answers the number of functions of a new module or library, and of each its name and description
/// as `GET_FUNCTION` does; 0 if it has more than `handles`.
///
/// So the program finds the functions of a small image without asking. A large one has many that
/// the program never uses, and the driver loads a function that it describes.
fn describe_all(
    session: &Session,
    executor: &Executor,
    parent: u64,
    library: bool,
    handles: &[u64],
    answer: &mut Answer,
) -> Done {
    // The driver describes functions only within a context.
    let context = session.contexts.get(executor.current);
    let found = by_name(session, parent, library, handles.len());
    let (Ok((_, device)), Ok(Some(found))) = (context, found) else {
        answer.word(0);
        return Ok(());
    };
    answer.word(found.len() as u64);
    for (handle, (name, func)) in handles.iter().zip(found) {
        answer.bytes(name.to_bytes());
        session.funcs.put(*handle, func)?;
        describe(session, func, device, answer);
    }
    Ok(())
}

/// Returns names and functions of a module or library; `None` for more than `most`.
///
/// Each is looked up by its name, as a program does: the driver has not loaded those that it lists,
/// and refuses to set their attributes (Triton, H200, driver 580).
fn by_name(
    session: &Session,
    parent: u64,
    library: bool,
    most: usize,
) -> Result<Option<Vec<(&CStr, Func)>>, Status> {
    let Some(listed) = list(session, parent, library, most)? else { return Ok(None) };
    let named = listed.into_iter().map(|object| {
        let func = Func { object: Object(object), kernel: library, parent };
        let name = function_name(session, func)?;
        Ok((name, Func { object: Object(find(session, parent, u64::from(library), name)?), ..func }))
    });
    named.collect::<Result<_, _>>().map(Some)
}

/// Returns the functions of a module, or the kernels of a library; `None` for more than `most`.
fn list(session: &Session, parent: u64, library: bool, most: usize) -> Result<Option<Vec<Handle>>, Status> {
    let call = &session.driver.call;
    let of = if library { session.libraries.get(parent)?.0 } else { session.modules.get(parent)?.0 };
    let mut count = 0;
    // SAFETY: the out pointer is valid; the parent is of the kind that each call wants.
    check(unsafe {
        if library {
            (call.cuLibraryGetKernelCount)(&mut count, of)
        } else {
            (call.cuModuleGetFunctionCount)(&mut count, of)
        }
    })?;
    if count as usize > most {
        return Ok(None);
    }
    let mut found = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: as above; the list has `count` elements.
    check(unsafe {
        if library {
            (call.cuLibraryEnumerateKernels)(found.as_mut_ptr(), count, of)
        } else {
            (call.cuModuleEnumerateFunctions)(found.as_mut_ptr(), count, of)
        }
    })?;
    Ok(Some(found))
}

fn function_name(session: &Session, func: Func) -> Result<&CStr, Status> {
    let call = &session.driver.call;
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: the out pointer is valid; the name is the driver's own, ending in a zero, and lives
    // as long as the function's module, which this session has.
    unsafe {
        check(if func.kernel {
            (call.cuKernelGetName)(&mut name, func.object.0)
        } else {
            (call.cuFuncGetName)(&mut name, func.object.0)
        })?;
        Ok(CStr::from_ptr(name))
    }
}

/// `MODULE_UNLOAD`
pub fn unload_module(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let module = session.modules.take(handle)?.0;
    session.funcs.forget(|func| func.parent == handle);
    session.texrefs.forget(|(_, parent)| *parent == handle);
    session.surfrefs.forget(|(_, parent)| *parent == handle);
    session.allocations.drop_object(session, handle);
    session.mirrors.forget_parent(handle);
    // SAFETY: a module of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuModuleUnload)(module) })?)
}

/// `LIBRARY_UNLOAD`
pub fn unload_library(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let library = session.libraries.take(handle)?.0;
    session.funcs.forget(|func| func.parent == handle);
    session.allocations.drop_object(session, handle);
    session.mirrors.forget_parent(handle);
    // SAFETY: a library of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuLibraryUnload)(library) })?)
}

/// `LIBRARY_MODULE`: new module handle, library.
pub fn library_module(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, library) = (r.word()?, r.word()?);
    let of = session.libraries.get(library)?.0;
    let mut module = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuLibraryGetModule)(&mut module, of) })?;
    session.modules.put(handle, Object(module))?;
    session.mirrors.know_module(handle, library);
    Ok(())
}

/// `GET_FUNCTION`: new handle, parent, kind, name.
///
/// The kind is 0 for a function of a module, 1 for a kernel of a library, 2 for a function of a
/// kernel. It answers the parameters' offsets and sizes, then the attributes.
pub fn get_function(
    session: &Session,
    executor: &mut Executor,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let (handle, parent, how) = (r.word()?, r.word()?, r.word()?);
    let name = name(r)?;
    enter_any(session, executor, 0)?;
    let func = find(session, parent, how, &name)?;
    let device = session.contexts.get(executor.current)?.1;
    let root = if how == 2 { session.funcs.get(parent)?.parent } else { parent };
    let func = Func { object: Object(func), kernel: how == 1, parent: root };
    session.funcs.put(handle, func)?;
    describe(session, func, device, answer);
    Ok(())
}

/// Looks up a function by the kinds of `GET_FUNCTION`.
fn find(session: &Session, parent: u64, how: u64, name: &CStr) -> Result<Handle, Status> {
    let call = &session.driver.call;
    let mut func = std::ptr::null_mut();
    // SAFETY: the out pointer is valid, parents belong to this worker, the name ends in a zero.
    check(unsafe {
        match how {
            0 => (call.cuModuleGetFunction)(&mut func, session.modules.get(parent)?.0, name.as_ptr()),
            1 => (call.cuLibraryGetKernel)(&mut func, session.libraries.get(parent)?.0, name.as_ptr()),
            2 => (call.cuKernelGetFunction)(&mut func, session.funcs.get(parent)?.object.0),
            _ => status::INVALID_VALUE,
        }
    })?;
    Ok(func)
}

fn describe(session: &Session, func: Func, device: u32, answer: &mut Answer) {
    let call = &session.driver.call;
    let (kernel, handle) = (func.kernel, func.object.0);
    let mut params = Vec::new();
    while params.len() < MAX_PARAMS {
        let (mut offset, mut size) = (0, 0);
        let index = params.len();
        // SAFETY: the out pointers are valid; the driver refuses an index past the end.
        let got = unsafe {
            if kernel {
                (call.cuKernelGetParamInfo)(handle, index, &mut offset, &mut size)
            } else {
                (call.cuFuncGetParamInfo)(handle, index, &mut offset, &mut size)
            }
        };
        if got != 0 {
            break;
        }
        params.push((offset, size));
    }
    answer.word(params.len() as u64);
    for (offset, size) in params {
        answer.word(offset as u64 | (size as u64) << 32);
    }
    answer.word(ATTRIBUTES as u64);
    for attribute in 0..ATTRIBUTES {
        answer.word(attribute_of(session, func, attribute, device).map_or(u64::MAX, |v| u64::from(v as u32)));
    }
}

fn attribute_of(session: &Session, func: Func, attribute: i32, device: u32) -> Result<i32, Status> {
    let call = &session.driver.call;
    let device = session.contexts.device(u64::from(device))?;
    let mut value = 0;
    // SAFETY: the out pointer is valid; the handle is of the kind that each call wants.
    check(unsafe {
        if func.kernel {
            (call.cuKernelGetAttribute)(&mut value, attribute, func.object.0, device)
        } else {
            (call.cuFuncGetAttribute)(&mut value, attribute, func.object.0)
        }
    })?;
    Ok(value)
}

/// Enters the primary context of a device if the frame names no context.
///
/// Runtimes look up kernels before they enter a context; the driver describes them only within one.
fn enter_any(session: &Session, executor: &mut Executor, device: u32) -> Result<(), Status> {
    if executor.current != 0 {
        return Ok(());
    }
    session.contexts.enter(session.driver, executor, make(CTX, 0, 1, device))
}

/// Returns the device of a kernel's attribute; `u64::MAX` stands for the current context's.
fn device(session: &Session, executor: &mut Executor, word: u64) -> Result<u32, Status> {
    enter_any(session, executor, if word == u64::MAX { 0 } else { word as u32 })?;
    if word == u64::MAX { Ok(session.contexts.get(executor.current)?.1) } else { Ok(word as u32) }
}

/// `FUNC_ATTRIBUTE`: function, attribute, device.
pub fn attribute(
    session: &Session,
    executor: &mut Executor,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let (func, attribute) = (session.funcs.get(r.word()?)?, r.word()? as i32);
    let value = attribute_of(session, func, attribute, device(session, executor, r.word()?)?)?;
    answer.word(u64::from(value as u32));
    Ok(())
}

/// `FUNC_SET_ATTRIBUTE`: function, kind, key, value, device.
///
/// The kind is 0 for an attribute, 1 for the cache configuration, 2 for the shared-memory
/// configuration.
pub fn set_attribute(session: &Session, executor: &mut Executor, r: &mut Reader<'_>) -> Done {
    let (func, what, key, value) =
        (session.funcs.get(r.word()?)?, r.word()?, r.word()? as i32, r.word()? as i32);
    let device = session.contexts.device(u64::from(device(session, executor, r.word()?)?))?;
    let call = &session.driver.call;
    let handle = func.object.0;
    // SAFETY: a kernel or function of this worker, each with the calls of its kind.
    Ok(check(unsafe {
        match (what, func.kernel) {
            (0, true) => (call.cuKernelSetAttribute)(key, value, handle, device),
            (0, false) => (call.cuFuncSetAttribute)(handle, key, value),
            (1, true) => (call.cuKernelSetCacheConfig)(handle, value, device),
            (1, false) => (call.cuFuncSetCacheConfig)(handle, value),
            (2, _) => (call.cuFuncSetSharedMemConfig)(handle, value),
            _ => status::INVALID_VALUE,
        }
    })?)
}

/// `GET_GLOBAL`: parent, kind, name; answers address, size, and whether it is managed.
///
/// The kind is 0 for a module, 1 for a library, 2 for managed memory of a library.
pub fn get_global(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (parent, how) = (r.word()?, r.word()?);
    let name = name(r)?;
    let call = &session.driver.call;
    let (mut address, mut size) = (0, 0);
    // SAFETY: the out pointers are valid, parents belong to this worker, the name ends in a zero.
    check(unsafe {
        match how {
            0 => (call.cuModuleGetGlobal_v2)(
                &mut address,
                &mut size,
                session.modules.get(parent)?.0,
                name.as_ptr(),
            ),
            1 => (call.cuLibraryGetGlobal)(
                &mut address,
                &mut size,
                session.libraries.get(parent)?.0,
                name.as_ptr(),
            ),
            2 => (call.cuLibraryGetManaged)(
                &mut address,
                &mut size,
                session.libraries.get(parent)?.0,
                name.as_ptr(),
            ),
            _ => status::INVALID_VALUE,
        }
    })?;
    // The program may access a managed variable, so the client needs to know.
    const IS_MANAGED: i32 = 8;
    let mut managed = 0u32;
    // SAFETY: the attribute is a boolean, which drivers write as one byte or as a word.
    unsafe { (call.cuPointerGetAttribute)((&raw mut managed).cast(), IS_MANAGED, address) };
    if managed != 0 {
        session.mirrors.know_managed(address, size as u64, parent);
    }
    answer.word(address);
    answer.word(size as u64);
    answer.word(u64::from(managed != 0));
    Ok(())
}

/// `ENUMERATE`: parent, kind (0 functions of a module, 1 kernels of a library); answers names.
pub fn enumerate(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (parent, library) = (r.word()?, r.word()? != 0);
    let found = list(session, parent, library, usize::MAX)?.unwrap_or_default();
    answer.word(found.len() as u64);
    for object in found {
        let func = Func { object: Object(object), kernel: library, parent };
        answer.bytes(function_name(session, func)?.to_bytes());
    }
    Ok(())
}
