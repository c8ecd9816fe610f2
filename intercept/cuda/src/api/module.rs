//! Modules, libraries, kernels.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::entry::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, Result, driver, give, give_optional, name,
};
use crate::functions::{self, How, OWN_DEVICE};
use crate::jit::Options;
use crate::modules::{
    client_of, forget_library, global, load, load_data, load_library, names, of_library, unload,
};
use crate::signatures::Signatures;
use crate::{clients, images, modules, streams, thread};

fn load_file(path: *const c_char) -> Result<Vec<u8>> {
    let path = name(path)?.to_str().map_err(|_| INVALID_VALUE)?;
    // PTX text needs a terminator.
    let mut image = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
    image.push(0);
    Ok(image)
}

/// Returns `true` if the program keeps a library's image until it unloads the library.
///
/// The option may have no value: cuBLAS passes no array of values. Other options change nothing.
fn keeps_image(keys: *const i32, values: *const *mut c_void, count: u32) -> bool {
    /// `CUlibraryOption`
    const BINARY_IS_PRESERVED: i32 = 1;
    const MAX_OPTIONS: u32 = 16;
    if count > MAX_OPTIONS || keys.is_null() {
        return false;
    }
    (0..count as usize).any(|i| {
        // SAFETY: by the call's contract both arrays have `count` elements, if they exist.
        let (key, value) = unsafe { (keys.add(i).read(), (!values.is_null()).then(|| values.add(i).read())) };
        key == BINARY_IS_PRESERVED && value.is_none_or(|value| value as usize & 0xff != 0)
    })
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

driver! {
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) {
        load_data(module, image)
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
        give(module, load(client, &images::read_image(image)?, &options)? as *mut c_void)
    }

    fn cuModuleLoadFatBinary(module: *mut *mut c_void, image: *const c_void) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
        give(module, load(client, &images::read_image(image)?, &none)? as *mut c_void)
    }

    fn cuModuleLoad(module: *mut *mut c_void, path: *const c_char) {
        let client = clients::get()?;
        thread::context()?;
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
        give(module, load(client, &load_file(path)?.as_slice().into(), &none)? as *mut c_void)
    }

    fn cuModuleUnload(module: *mut c_void) {
        clients::get()?;
        streams::allowed()?;
        unload(module as u64, handle::MODULE, op::MODULE_UNLOAD)
    }

    fn cuModuleGetLoadingMode(mode: *mut i32) {
        const EAGER: i32 = 1;
        const LAZY: i32 = 2;
        // The worker's driver gets the same variable.
        give(mode, if std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|v| v == "EAGER") { EAGER } else { LAZY })
    }

    fn cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, symbol: *const c_char) {
        if function.is_null() || handle::kind(module as u64) != handle::MODULE {
            return Err(if function.is_null() { INVALID_VALUE } else { INVALID_HANDLE });
        }
        let symbol = name(symbol)?.to_owned();
        give(function, functions::get(clients::by_object(module as u64)?, module as u64, How::Function, symbol)? as *mut c_void)
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
        library_keys: *const i32, library_values: *const *mut c_void, library_count: u32,
    ) {
        if library.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        let image = images::read_image(image)?;
        let kept = keeps_image(library_keys, library_values, library_count);
        let signatures = if kept { Signatures::kept(&image) } else { Signatures::copied(&image) };
        give(library, load_library(&image, signatures, &options)? as *mut c_void)
    }

    fn cuLibraryLoadFromFile(
        library: *mut *mut c_void, path: *const c_char, keys: *const i32, values: *const *mut c_void, count: u32,
        _library_keys: *const i32, _library_values: *const *mut c_void, _library_count: u32,
    ) {
        if library.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        let file = load_file(path)?;
        let image = file.as_slice().into();
        give(library, load_library(&image, Signatures::copied(&image), &options)? as *mut c_void)
    }

    fn cuLibraryUnload(library: *mut c_void) {
        forget_library(library as u64);
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
        give(module, of_library(library as u64)? as *mut c_void)
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
        give(function, functions::of_kernel(client, &*functions::find(kernel as u64)?)? as *mut c_void)
    }

    fn cuKernelGetLibrary(library: *mut *mut c_void, kernel: *mut c_void) {
        give(library, functions::find(kernel as u64)?.parent as *mut c_void)
    }

    fn cuFuncGetModule(module: *mut *mut c_void, function: *mut c_void) {
        let function = functions::own(function as u64)?;
        let module_of = match functions::find(function.parent) {
            // The function of a library's kernel.
            Ok(kernel) => modules::of_library(kernel.parent)?,
            Err(_) => function.parent,
        };
        give(module, module_of as *mut c_void)
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
        // The driver has loaded each function that a lookup returned, with lazy loading, too.
        const LOADED: i32 = 1;
        functions::own(function as u64)?;
        give(state, LOADED)
    }

    fn cuFuncLoad(function: *mut c_void) {
        functions::own(function as u64).map(|_| ())
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
