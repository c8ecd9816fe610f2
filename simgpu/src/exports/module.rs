//! Modules, libraries, kernels and functions.

use super::{out, out_opt, text, texture_reference};
use crate::driver::context::working;
use crate::driver::module::{
    self, Content, FUNCTIONS, Function, KERNELS, LIBRARIES, Library, MODULES, Module,
};
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result};
use crate::export;
use crate::ptx::ast::Reference;
use crate::registry::handle;
use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Writes a message to the log buffers of JIT options.
pub(super) unsafe fn log(n: u32, options: *const u32, values: *const *mut u8, error: &str) {
    if options.is_null() || values.is_null() {
        return;
    }
    let (mut buffers, mut sizes) = ([std::ptr::null_mut::<u8>(); 2], [0usize; 2]);
    for i in 0..n as usize {
        // SAFETY: the program gave `n` options and values.
        let (option, value) = unsafe { (*options.add(i), *values.add(i)) };
        match option {
            3 => buffers[0] = value,
            4 => sizes[0] = value as usize & 0xffff_ffff,
            5 => buffers[1] = value,
            6 => sizes[1] = value as usize & 0xffff_ffff,
            _ => {}
        }
    }
    for (which, message) in [(0, ""), (1, error)] {
        let (p, room) = (buffers[which], sizes[which]);
        let n = message.len().min(room.saturating_sub(1));
        if !p.is_null() && room > 0 {
            // SAFETY: the program gave a buffer of this size.
            unsafe {
                std::ptr::copy_nonoverlapping(message.as_ptr(), p, n);
                p.add(n).write(0);
            }
        }
    }
    // The size options return the number of bytes used.
    for i in 0..n as usize {
        // SAFETY: the program gave `n` options and values, and lets the driver write the values.
        unsafe {
            match *options.add(i) {
                4 => values.cast_mut().add(i).write(std::ptr::null_mut()),
                6 => values.cast_mut().add(i).write(error.len().min(sizes[1]) as *mut u8),
                _ => {}
            }
        }
    }
}

unsafe fn compile(image: *const u8, n: u32, options: *const u32, values: *const *mut u8) -> Result<Content> {
    // SAFETY: the program gave a complete image.
    unsafe {
        match module::compile_at(image) {
            Ok(content) => {
                log(n, options, values, "");
                Ok(content)
            }
            Err((code, message)) => {
                log(n, options, values, &message);
                Err(code)
            }
        }
    }
}

unsafe fn load(
    to: *mut usize,
    image: *const u8,
    n: u32,
    options: *const u32,
    values: *const *mut u8,
) -> Result {
    let ctx = working()?;
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: as for `compile`.
    unsafe {
        let content = compile(image, n, options, values)?;
        out(to, handle(&Module::new(&ctx, Arc::new(content), None)?))
    }
}

/// Reads a file, and appends the terminator that the driver expects of an image in memory.
fn read_file(path: &str) -> Result<Vec<u8>> {
    let mut bytes = std::fs::read(path).map_err(|_| errors::FILE_NOT_FOUND)?;
    bytes.extend([0; 64]);
    Ok(bytes)
}

fn library(h: usize) -> Result<Arc<Library>> {
    driver()?;
    LIBRARIES.get(h)
}

fn module(h: usize) -> Result<Arc<Module>> {
    working()?;
    MODULES.get(h)
}

fn any_function(h: usize) -> Result<Arc<Function>> {
    module::function(h, &working()?)
}

/// Returns a function, for calls that do not accept a kernel in its place.
fn own_function(h: usize) -> Result<Arc<Function>> {
    working()?;
    FUNCTIONS.get(h)
}

/// Returns a function for calls that do not load it (Triton, H200, driver 580).
fn loaded_function(h: usize) -> Result<Arc<Function>> {
    let function = own_function(h)?;
    if function.loaded.load(Ordering::Relaxed) { Ok(function) } else { Err(errors::FUNCTION_NOT_LOADED) }
}

/// Returns the parameters of a kernel, which needs no context, or of a function.
fn params(h: usize) -> Result<Vec<(u32, u32)>> {
    driver()?;
    match KERNELS.find(h) {
        Some(k) => {
            let library = k.library.upgrade().ok_or(INVALID_HANDLE)?;
            let found = library.content.params(k.name.to_str().map_err(|_| NOT_FOUND)?);
            Ok(found.ok_or(NOT_FOUND)?.0)
        }
        None => Ok(FUNCTIONS.get(h)?.params.clone()),
    }
}

fn param(h: usize, index: usize) -> Result<(u32, u32)> {
    let (at, size) = params(h)?.get(index).copied().ok_or(INVALID_VALUE)?;
    let claimed = config().param_size;
    Ok((at, if claimed == 0 { size } else { claimed }))
}

/// Returns a kernel as a function of the current context, or of its device's primary context.
fn kernel_function(
    h: usize,
    device: i32,
) -> Result<(Arc<module::Kernel>, Arc<Function>, Arc<crate::driver::context::Context>)> {
    let k = KERNELS.get(h)?;
    let d = driver()?.device(device)?;
    let ctx = match crate::driver::context::top()? {
        Some(c) if c.device == d.ordinal => c,
        _ => d.primary.clone(),
    };
    let f = k.function(&ctx)?;
    Ok((k, f, ctx))
}

export! {
    fn cuModuleLoadData(to: *mut usize, image: *const u8) {
        load(to, image, 0, std::ptr::null(), std::ptr::null())
    }

    fn cuModuleLoadDataEx(to: *mut usize, image: *const u8, n: u32, options: *const u32, values: *const *mut u8) {
        load(to, image, n, options, values)
    }

    fn cuModuleLoadFatBinary(to: *mut usize, image: *const u8) {
        load(to, image, 0, std::ptr::null(), std::ptr::null())
    }

    fn cuModuleLoad(to: *mut usize, path: *const c_char) {
        let bytes = read_file(text(path)?)?;
        load(to, bytes.as_ptr(), 0, std::ptr::null(), std::ptr::null())
    }

    fn cuModuleUnload(h: usize) {
        let m = module(h)?;
        if m.library.is_some() {
            return Err(errors::NOT_PERMITTED);
        }
        crate::driver::capture::forbid_unsafe()?;
        texture_reference::forget(&m);
        m.unload();
        Ok(())
    }

    fn cuModuleGetLoadingMode(mode: *mut u32) {
        out(mode, 2)
    }

    fn cuModuleGetFunction(to: *mut usize, m: usize, name: *const c_char) {
        let f = module(m)?.function(text(name)?)?;
        out(to, handle(&f))
    }

    fn cuModuleGetFunctionCount(count: *mut u32, m: usize) {
        out(count, module(m)?.function_names().len() as u32)
    }

    fn cuModuleEnumerateFunctions(list: *mut usize, n: u32, m: usize) {
        let m = module(m)?;
        for (i, name) in m.function_names().iter().take(n as usize).enumerate() {
            out(list.add(i), handle(&m.listed(name)?))?;
        }
        Ok(())
    }

    fn cuModuleGetGlobal_v2(at: *mut u64, bytes: *mut usize, m: usize, name: *const c_char) {
        let (base, size) = module(m)?.global(text(name)?)?;
        out_opt(at, base);
        out_opt(bytes, size as usize);
        Ok(())
    }

    fn cuModuleGetTexRef(to: *mut usize, m: usize, name: *const c_char) {
        let m = module(m)?;
        let address = m.reference(text(name)?, Reference::Texture)?;
        out(to, texture_reference::texture_of(&m, address))
    }

    fn cuModuleGetSurfRef(to: *mut usize, m: usize, name: *const c_char) {
        let m = module(m)?;
        let address = m.reference(text(name)?, Reference::Surface)?;
        out(to, texture_reference::surface_of(&m, address))
    }

    fn cuLibraryLoadData(
        to: *mut usize, image: *const u8, options: *const u32, values: *const *mut u8, n: u32,
        _lib_options: *const u32, _lib_values: *const *mut u8, _lib_n: u32
    ) {
        driver()?;
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        let content = compile(image, n, options, values)?;
        out(to, handle(&Library::new(content)?))
    }

    fn cuLibraryLoadFromFile(
        to: *mut usize, path: *const c_char, options: *const u32, values: *const *mut u8, n: u32,
        _lib_options: *const u32, _lib_values: *const *mut u8, _lib_n: u32
    ) {
        driver()?;
        let bytes = read_file(text(path)?)?;
        let content = compile(bytes.as_ptr(), n, options, values)?;
        out(to, handle(&Library::new(content)?))
    }

    fn cuLibraryUnload(h: usize) {
        driver()?;
        LIBRARIES.remove(h)?.unload();
        Ok(())
    }

    fn cuLibraryGetKernel(to: *mut usize, h: usize, name: *const c_char) {
        let k = library(h)?.kernel(text(name)?)?;
        out(to, handle(&k))
    }

    fn cuLibraryGetKernelCount(count: *mut u32, h: usize) {
        out(count, library(h)?.content.kernel_names().len() as u32)
    }

    fn cuLibraryEnumerateKernels(list: *mut usize, n: u32, h: usize) {
        let l = library(h)?;
        for (i, name) in l.content.kernel_names().iter().take(n as usize).enumerate() {
            out(list.add(i), handle(&l.kernel(name)?))?;
        }
        Ok(())
    }

    fn cuLibraryGetModule(to: *mut usize, h: usize) {
        let m = library(h)?.module(&working()?)?;
        out(to, handle(&m))
    }

    fn cuLibraryGetGlobal(at: *mut u64, bytes: *mut usize, h: usize, name: *const c_char) {
        let (base, size) = library(h)?.module(&working()?)?.global(text(name)?)?;
        out_opt(at, base);
        out_opt(bytes, size as usize);
        Ok(())
    }

    fn cuLibraryGetManaged(at: *mut u64, bytes: *mut usize, h: usize, name: *const c_char) {
        let l = library(h)?;
        let a = l.managed.get(text(name)?).ok_or(NOT_FOUND)?;
        out_opt(at, a.base);
        out_opt(bytes, a.size as usize);
        Ok(())
    }

    fn cuLibraryGetUnifiedFunction(_to: *mut usize, h: usize, _name: *const c_char) {
        library(h)?;
        Err(NOT_FOUND)
    }

    fn cuKernelGetFunction(to: *mut usize, k: usize) {
        let f = KERNELS.get(k)?.function(&working()?)?;
        out(to, handle(&f))
    }

    fn cuKernelGetLibrary(to: *mut usize, k: usize) {
        let l = KERNELS.get(k)?.library.upgrade().ok_or(INVALID_HANDLE)?;
        out(to, handle(&l))
    }

    fn cuKernelGetAttribute(value: *mut i32, id: u32, k: usize, device: i32) {
        let (_, f, _) = kernel_function(k, device)?;
        out(value, f.attribute(id).ok_or(INVALID_VALUE)?)
    }

    fn cuKernelSetAttribute(id: u32, value: i32, k: usize, device: i32) {
        let (kernel, _, ctx) = kernel_function(k, device)?;
        kernel.set_attribute(&ctx, id, value)
    }

    fn cuKernelSetCacheConfig(k: usize, _config: u32, device: i32) {
        driver()?.device(device)?;
        KERNELS.get(k).map(drop)
    }

    // The handle of a live library's kernel stays valid, so that its name may be returned by
    // reference.
    fn cuKernelGetName(name: *mut *const c_char, k: usize) {
        driver()?;
        match KERNELS.find(k) {
            Some(k) => out(name, k.name.as_ptr()),
            None => out(name, FUNCTIONS.get(k)?.name.as_ptr()),
        }
    }

    fn cuKernelGetParamInfo(k: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let (at, len) = param(k, index)?;
        out(offset, at as usize)?;
        out_opt(size, len as usize);
        Ok(())
    }

    fn cuKernelGetParamCount(k: usize, count: *mut usize) {
        out(count, params(k)?.len())
    }

    fn cuFuncGetParamInfo(f: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let (at, len) = param(f, index)?;
        out(offset, at as usize)?;
        out_opt(size, len as usize);
        Ok(())
    }

    fn cuFuncGetParamCount(f: usize, count: *mut usize) {
        out(count, params(f)?.len())
    }

    fn cuFuncGetAttribute(value: *mut i32, id: u32, f: usize) {
        out(value, loaded_function(f)?.attribute(id).ok_or(INVALID_VALUE)?)
    }

    fn cuFuncSetAttribute(f: usize, id: u32, value: i32) {
        loaded_function(f)?.set_attribute(id, value)
    }

    fn cuFuncSetCacheConfig(f: usize, config: u32) {
        if config > 3 {
            return Err(INVALID_VALUE);
        }
        any_function(f).map(drop)
    }

    fn cuFuncSetSharedMemConfig(f: usize, config: u32) {
        if config > 2 {
            return Err(INVALID_VALUE);
        }
        any_function(f).map(drop)
    }

    fn cuFuncGetModule(to: *mut usize, f: usize) {
        out(to, own_function(f)?.module)
    }

    fn cuFuncGetName(name: *mut *const c_char, f: usize) {
        driver()?;
        match KERNELS.find(f) {
            Some(k) => out(name, k.name.as_ptr()),
            None => out(name, FUNCTIONS.get(f)?.name.as_ptr()),
        }
    }

    fn cuFuncIsLoaded(state: *mut u32, f: usize) {
        driver()?;
        out(state, u32::from(FUNCTIONS.get(f)?.loaded.load(Ordering::Relaxed)))
    }

    fn cuFuncLoad(f: usize) {
        driver()?;
        FUNCTIONS.get(f)?.loaded.store(true, Ordering::Relaxed);
        Ok(())
    }
}
