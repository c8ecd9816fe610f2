//! Modules, libraries, kernels.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, cross_lease_error, string, word};
use crate::entry::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result, driver, give, give_optional, name,
};
use crate::functions::{self, How, OWN_DEVICE};
use crate::ranges::{self, Kind};
use crate::{clients, handles, images, mapped, streams, thread};

/// `CU_JIT_*` options whose value is a pointer.
///
/// The reply fills the log buffers; the worker does not get these options.
const WALL_TIME: i32 = 2;
const INFO_LOG: i32 = 3;
const INFO_SIZE: i32 = 4;
const ERROR_LOG: i32 = 5;
const ERROR_SIZE: i32 = 6;
const LEFT_OUT: &[i32] = &[WALL_TIME, INFO_LOG, ERROR_LOG, 17, 18];

pub(super) struct Options {
    pairs: Vec<(i32, u64)>,
    info: *mut c_char,
    info_size: usize,
    error: *mut c_char,
    error_size: usize,
}

impl Options {
    pub(super) fn read(count: u32, keys: *const i32, values: *const *mut c_void) -> Result<Self> {
        let mut options = Self {
            pairs: Vec::new(),
            info: std::ptr::null_mut(),
            info_size: 0,
            error: std::ptr::null_mut(),
            error_size: 0,
        };
        if count > 0 && keys.is_null() {
            return Err(INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: by the call's contract both arrays have `count` elements; `keys` is not null,
            // and null `values` are not read.
            let (key, value) = unsafe {
                (
                    keys.add(i).read(),
                    if values.is_null() { std::ptr::null_mut() } else { values.add(i).read() },
                )
            };
            match key {
                INFO_LOG => options.info = value.cast(),
                ERROR_LOG => options.error = value.cast(),
                INFO_SIZE => options.info_size = value as usize & 0xffff_ffff,
                ERROR_SIZE => options.error_size = value as usize & 0xffff_ffff,
                _ => {}
            }
            if !LEFT_OUT.contains(&key) {
                options.pairs.push((key, value as u64));
            }
        }
        Ok(options)
    }

    pub(super) fn write(&self, w: &mut gpusession_proto::frame::Writer<'_>) {
        w.word(self.pairs.len() as u64);
        for (key, value) in &self.pairs {
            w.word(*key as u32 as u64);
            w.word(*value);
        }
    }

    pub(super) fn logs(&self, reply: &gpusession_link::Reply) -> Result {
        let mut r = reply.reader();
        for (buffer, size) in [(self.info, self.info_size), (self.error, self.error_size)] {
            let text = string(&mut r)?;
            if !buffer.is_null() && size > 0 {
                crate::entry::give_text(buffer, size.min(i32::MAX as usize) as i32, text)?;
            }
        }
        Ok(())
    }
}

/// Loads a module into the current context.
fn load(client: &Client, image: &[u8], options: &Options) -> Result<u64> {
    let new = client.mint(handle::MODULE);
    load_on(client, op::MODULE_LOAD, new, image, options).inspect_err(|_| handles::retire(new))?;
    Ok(new)
}

fn load_on(client: &Client, operation: u16, new: u64, image: &[u8], options: &Options) -> Result {
    let hash = images::offer(client, image)?;
    let reply = client.ask(operation, |w| {
        w.word(new);
        w.bytes(&hash);
        options.write(w);
    })?;
    options.logs(&reply)?;
    client.check_status(reply.status)
}

/// Exceptions of a library that differs between clients.
#[derive(Default)]
struct ForeignModule {
    /// Numbers of clients whose workers could not load the library, with the errors.
    failed: Vec<(u8, i32)>,
    /// Number of the client that has the library's managed variables.
    managed: Option<u8>,
}

static FOREIGN_MODULES: Mutex<BTreeMap<u64, ForeignModule>> = Mutex::new(BTreeMap::new());

/// Loads a library, which belongs to no context, on every client.
///
/// One success suffices, because the library may have no code for another client's kind of GPU.
fn load_library(image: &[u8], options: &Options) -> Result<u64> {
    let current = clients::get()?;
    let new = handles::mint(handle::LIBRARY, 0);
    let mut failed = Vec::new();
    let mut loaded = false;
    for client in clients::all()?.filter(|c| c.number != current.number).chain([current]) {
        match load_on(client, op::LIBRARY_LOAD, new, image, options) {
            Ok(()) => loaded = true,
            Err(status) => failed.push((client.number, status)),
        }
    }
    match failed.last() {
        Some((_, status)) if !loaded => {
            handles::retire(new);
            return Err(*status);
        }
        Some(_) => drop(foreign_modules().insert(new, ForeignModule { failed, managed: None })),
        None => {}
    }
    Ok(new)
}

fn foreign_modules() -> MutexGuard<'static, BTreeMap<u64, ForeignModule>> {
    FOREIGN_MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an error if a library is not loaded on a client, or if another client has its managed
/// variables.
pub fn usable_on(library: u64, client: &Client) -> Result {
    let apart = foreign_modules();
    let Some(known) = apart.get(&library) else { return Ok(()) };
    if let Some((_, status)) = known.failed.iter().find(|(number, _)| *number == client.number) {
        return Err(*status);
    }
    match known.managed {
        Some(number) if number != client.number => Err(cross_lease_error("a library with managed variables")),
        _ => Ok(()),
    }
}

/// Returns the client to ask about a module, or about a library in the current context.
fn client_of(parent: u64) -> Result<&'static Client> {
    if handle::kind(parent) == handle::MODULE {
        return clients::of(parent);
    }
    let current = clients::get()?;
    usable_on(parent, current)?;
    Ok(current)
}

fn load_file(path: *const c_char) -> Result<Vec<u8>> {
    let path = name(path)?.to_str().map_err(|_| INVALID_VALUE)?;
    // PTX text needs a terminator.
    let mut image = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
    image.push(0);
    Ok(image)
}

/// Address and size of variables, which do not change.
///
/// The key is parent, context (of a library's variable), kind of lookup, and name.
type Globals = HashMap<(u64, u64, u64, CString), (u64, usize)>;
static GLOBALS: Mutex<Option<Globals>> = Mutex::new(None);

fn global(address: *mut u64, size: *mut usize, parent: u64, how: u64, symbol: *const c_char) -> Result {
    const OF_LIBRARY: u64 = 1;
    let client = client_of(parent)?;
    // Each context has its own copy of a library's variables, except managed ones.
    let ctx = if how == OF_LIBRARY { thread::current() } else { 0 };
    let key = (parent, ctx, how, name(symbol)?.to_owned());
    let known =
        GLOBALS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().get(&key).copied();
    let (base, len) = match known {
        Some(known) => known,
        None => {
            let reply = client.call(op::GET_GLOBAL, |w| {
                w.word(parent);
                w.word(how);
                w.bytes(key.3.as_bytes());
            })?;
            let mut r = reply.reader();
            let found = (word(&mut r)?, word(&mut r)? as usize);
            let managed = word(&mut r)? != 0;
            client.claims.claim("a variable", found.0, found.1 as u64)?;
            if managed {
                mapped::map_variable(client, found.0, found.1 as u64)?;
                if clients::several() && handle::kind(parent) == handle::LIBRARY {
                    foreign_modules().entry(parent).or_default().managed.get_or_insert(client.number);
                }
            }
            let kind = if managed { Kind::ManagedVariable } else { Kind::Global };
            ranges::add(found.0, found.1 as u64, kind, client.context());
            GLOBALS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(key, found);
            found
        }
    };
    give_optional(address, base);
    give_optional(size, len);
    Ok(())
}

fn unload(parent: u64, kind: u8, operation: u16) -> Result {
    let current = clients::get()?;
    if handle::kind(parent) != kind {
        return Err(INVALID_HANDLE);
    }
    functions::forget(parent);
    let mut globals = GLOBALS.lock().unwrap_or_else(PoisonError::into_inner);
    globals.get_or_insert_default().retain(|(p, ..), (base, _)| {
        if *p == parent
            && let Some(range) = ranges::take(*base, |k| matches!(k, Kind::Global | Kind::ManagedVariable))
            && range.kind == Kind::ManagedVariable
        {
            // A lost worker has freed it already.
            let _ = mapped::unmap(*base);
        }
        *p != parent
    });
    drop(globals);
    if kind == handle::MODULE {
        let client = clients::of(parent)?;
        client.post(operation, |w| w.word(parent))?;
        handles::retire(parent);
        return client.take_late_error();
    }
    let failed = foreign_modules().remove(&parent).unwrap_or_default().failed;
    for client in clients::all()?.filter(|c| !failed.iter().any(|(number, _)| *number == c.number)) {
        // A lost worker has unloaded it already.
        let _ = client.post(operation, |w| w.word(parent));
    }
    handles::retire(parent);
    current.take_late_error()
}

fn names(parent: u64, how: u64) -> Result<Vec<CString>> {
    let client = client_of(parent)?;
    let reply = client.call(op::ENUMERATE, |w| {
        w.word(parent);
        w.word(how);
    })?;
    let mut r = reply.reader();
    let count = word(&mut r)?;
    (0..count).map(|_| string(&mut r).and_then(|s| CString::new(s).map_err(|_| NOT_FOUND))).collect()
}

/// Returns the handles of all functions of a module.
pub fn functions_of(module: u64) -> Result<Vec<u64>> {
    if handle::kind(module) != handle::MODULE {
        return Err(INVALID_HANDLE);
    }
    let client = clients::of(module)?;
    let names = names(module, How::Function as u64)?;
    names.into_iter().map(|name| functions::get(client, module, How::Function, name)).collect()
}

fn enumerate(out: *mut *mut c_void, most: u32, parent: u64, how: How) -> Result {
    let client = client_of(parent)?;
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    for (i, name) in names(parent, how as u64)?.into_iter().take(most as usize).enumerate() {
        let function = functions::get(client, parent, how, name)?;
        // SAFETY: by the call's contract the array has `most` elements, and `take` bounds the
        // index.
        unsafe { out.add(i).write(function as *mut c_void) };
    }
    Ok(())
}

/// Modules of libraries, by library and context, so that each has one handle.
static LIBRARY_MODULES: Mutex<Option<HashMap<(u64, u64), u64>>> = Mutex::new(None);

/// Removes the modules, variables and functions that libraries had in a destroyed context.
pub fn forget_context(ctx: u64) {
    functions::forget_context(ctx);
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.get_or_insert_default().retain(|(_, of), _| *of != ctx);
    let mut globals = GLOBALS.lock().unwrap_or_else(PoisonError::into_inner);
    globals.get_or_insert_default().retain(|(_, of, ..), _| *of != ctx);
}

driver! {
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
        give(module, load(client, images::bytes(image)?, &none)? as *mut c_void)
    }

    fn cuModuleLoadDataEx(
        module: *mut *mut c_void, image: *const c_void, count: u32, keys: *const i32, values: *const *mut c_void,
    ) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        give(module, load(client, images::bytes(image)?, &options)? as *mut c_void)
    }

    fn cuModuleLoadFatBinary(module: *mut *mut c_void, image: *const c_void) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
        give(module, load(client, images::bytes(image)?, &none)? as *mut c_void)
    }

    fn cuModuleLoad(module: *mut *mut c_void, path: *const c_char) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
        give(module, load(client, &load_file(path)?, &none)? as *mut c_void)
    }

    fn cuModuleUnload(module: *mut c_void) {
        clients::get()?;
        streams::allowed()?;
        unload(module as u64, handle::MODULE, op::MODULE_UNLOAD)
    }

    fn cuModuleGetLoadingMode(mode: *mut i32) {
        const LAZY: i32 = 2;
        give(mode, LAZY)
    }

    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, symbol: *const c_char) {
        if function.is_null() || handle::kind(module as u64) != handle::MODULE {
            return Err(if function.is_null() { INVALID_VALUE } else { INVALID_HANDLE });
        }
        let symbol = name(symbol)?.to_owned();
        give(function, functions::get(clients::of(module as u64)?, module as u64, How::Function, symbol)? as *mut c_void)
    }

    fn cuModuleGetFunctionCount(count: *mut u32, module: *mut c_void) {
        give(count, names(module as u64, 0)?.len() as u32)
    }

    fn cuModuleEnumerateFunctions(functions: *mut *mut c_void, most: u32, module: *mut c_void) {
        enumerate(functions, most, module as u64, How::Function)
    }

    fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: *mut c_void, symbol: *const c_char) {
        global(address, size, module as u64, 0, symbol)
    }

    fn cuLibraryLoadData(
        library: *mut *mut c_void, image: *const c_void, keys: *const i32, values: *const *mut c_void, count: u32,
        _library_keys: *const i32, _library_values: *const *mut c_void, _library_count: u32,
    ) {
        // Library options only state whether the program keeps the image; the worker has a copy of
        // its own.
        if library.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        give(library, load_library(images::bytes(image)?, &options)? as *mut c_void)
    }

    fn cuLibraryLoadFromFile(
        library: *mut *mut c_void, path: *const c_char, keys: *const i32, values: *const *mut c_void, count: u32,
        _library_keys: *const i32, _library_values: *const *mut c_void, _library_count: u32,
    ) {
        if library.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        give(library, load_library(&load_file(path)?, &options)? as *mut c_void)
    }

    fn cuLibraryUnload(library: *mut c_void) {
        LIBRARY_MODULES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default()
            .retain(|(l, _), _| *l != library as u64);
        unload(library as u64, handle::LIBRARY, op::LIBRARY_UNLOAD)
    }

    fn cuLibraryGetKernel(kernel: *mut *mut c_void, library: *mut c_void, symbol: *const c_char) {
        if kernel.is_null() || handle::kind(library as u64) != handle::LIBRARY {
            return Err(if kernel.is_null() { INVALID_VALUE } else { INVALID_HANDLE });
        }
        let symbol = name(symbol)?.to_owned();
        give(kernel, functions::get(client_of(library as u64)?, library as u64, How::Kernel, symbol)? as *mut c_void)
    }

    fn cuLibraryGetKernelCount(count: *mut u32, library: *mut c_void) {
        give(count, names(library as u64, 1)?.len() as u32)
    }

    fn cuLibraryEnumerateKernels(kernels: *mut *mut c_void, most: u32, library: *mut c_void) {
        enumerate(kernels, most, library as u64, How::Kernel)
    }

    fn cuLibraryGetModule(module: *mut *mut c_void, library: *mut c_void) {
        let client = client_of(library as u64)?;
        let key = (library as u64, thread::context()?);
        let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        let modules = modules.get_or_insert_default();
        if let Some(known) = modules.get(&key) {
            return give(module, *known as *mut c_void);
        }
        let new = client.mint(handle::MODULE);
        client.call(op::LIBRARY_MODULE, |w| {
            w.word(new);
            w.word(library as u64);
        })?;
        modules.insert(key, new);
        give(module, new as *mut c_void)
    }

    fn cuLibraryGetGlobal(address: *mut u64, size: *mut usize, library: *mut c_void, symbol: *const c_char) {
        thread::context()?;
        global(address, size, library as u64, 1, symbol)
    }

    fn cuLibraryGetManaged(address: *mut u64, size: *mut usize, library: *mut c_void, symbol: *const c_char) {
        global(address, size, library as u64, 2, symbol)
    }

    fn cuKernelGetFunction(function: *mut *mut c_void, kernel: *mut c_void) {
        let client = clients::get()?;
        let kernel = functions::find(kernel as u64)?;
        kernel.reach(client)?;
        give(function, functions::get(client, kernel.handle, How::OfKernel, kernel.name.clone())? as *mut c_void)
    }

    fn cuKernelGetLibrary(library: *mut *mut c_void, kernel: *mut c_void) {
        give(library, functions::find(kernel as u64)?.parent as *mut c_void)
    }

    fn cuFuncGetModule(module: *mut *mut c_void, function: *mut c_void) {
        give(module, functions::own(function as u64)?.parent as *mut c_void)
    }

    fn cuKernelGetName(text: *mut *const c_char, kernel: *mut c_void) {
        give(text, lasting(&functions::find(kernel as u64)?.name))
    }

    fn cuFuncGetName(text: *mut *const c_char, function: *mut c_void) {
        give(text, lasting(&functions::find(function as u64)?.name))
    }

    fn cuKernelGetParamInfo(kernel: *mut c_void, index: usize, offset: *mut usize, size: *mut usize) {
        param(kernel, index, offset, size)
    }

    fn cuFuncGetParamInfo(function: *mut c_void, index: usize, offset: *mut usize, size: *mut usize) {
        param(function, index, offset, size)
    }

    fn cuKernelGetParamCount(kernel: *mut c_void, count: *mut usize) {
        give(count, functions::find(kernel as u64)?.params.len())
    }

    fn cuFuncGetParamCount(function: *mut c_void, count: *mut usize) {
        give(count, functions::find(function as u64)?.params.len())
    }

    fn cuFuncIsLoaded(state: *mut i32, function: *mut c_void) {
        const LOADED: i32 = 1;
        functions::find(function as u64)?;
        give(state, LOADED)
    }

    fn cuFuncLoad(function: *mut c_void) {
        functions::find(function as u64).map(|_| ())
    }

    fn cuKernelGetAttribute(value: *mut i32, attribute: i32, kernel: *mut c_void, device: i32) {
        let (client, device) = clients::device(device)?;
        let kernel = functions::find(kernel as u64)?;
        // The attributes of the first lookup belong to the device that was current then; with one
        // device there is no other.
        let device = if client.devices.len() == 1 { OWN_DEVICE } else { device.local as i32 };
        give(value, kernel.attribute(client, attribute, device)?)
    }

    fn cuFuncGetAttribute(value: *mut i32, attribute: i32, function: *mut c_void) {
        let function = functions::own(function as u64)?;
        give(value, function.attribute(function.client()?, attribute, OWN_DEVICE)?)
    }

    fn cuKernelSetAttribute(attribute: i32, value: i32, kernel: *mut c_void, device: i32) {
        let (client, device) = clients::device(device)?;
        functions::find(kernel as u64)?.set(client, 0, attribute, value, device.local as i32)
    }

    fn cuFuncSetAttribute(function: *mut c_void, attribute: i32, value: i32) {
        let function = functions::own(function as u64)?;
        function.set(function.client()?, 0, attribute, value, OWN_DEVICE)
    }

    fn cuKernelSetCacheConfig(kernel: *mut c_void, config: i32, device: i32) {
        let (client, device) = clients::device(device)?;
        functions::find(kernel as u64)?.set(client, 1, 0, config, device.local as i32)
    }

    fn cuFuncSetCacheConfig(function: *mut c_void, config: i32) {
        let function = functions::find(function as u64)?;
        function.set(function.client()?, 1, 0, config, OWN_DEVICE)
    }

    fn cuFuncSetSharedMemConfig(function: *mut c_void, config: i32) {
        let function = functions::find(function as u64)?;
        function.set(function.client()?, 2, 0, config, OWN_DEVICE)
    }
}

fn param(function: *mut c_void, index: usize, offset: *mut usize, size: *mut usize) -> Result {
    let function = functions::find(function as u64)?;
    let param = function.params.get(index).ok_or(INVALID_VALUE)?;
    give(offset, param.offset as usize)?;
    give_optional(size, param.size as usize);
    Ok(())
}

/// Returns a copy of a name that stays valid after its function, because the driver lends names for
/// good.
fn lasting(name: &CStr) -> *const c_char {
    static NAMES: Mutex<Option<HashMap<CString, &'static CStr>>> = Mutex::new(None);
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    if let Some(known) = names.get(name) {
        return known.as_ptr();
    }
    let kept: &'static CStr = Box::leak(name.to_owned().into_boxed_c_str());
    names.insert(name.to_owned(), kept);
    kept.as_ptr()
}
