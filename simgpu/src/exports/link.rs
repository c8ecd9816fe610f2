//! The linker: it joins PTX, which stays text.

use super::module::log;
use super::{out, out_opt, slice, text};
use crate::driver::context::working;
use crate::driver::driver;
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::fatbin::{self, Image};
use crate::ptx;
use crate::registry::Registry;
use parking_lot::Mutex;
use std::ffi::c_char;
use std::sync::Arc;

static LINKS: Registry<Link> = Registry::new();

struct Link {
    /// Number and addresses of the options; the program keeps them until it destroys the link.
    options: (u32, usize, usize),
    inputs: Mutex<String>,
    /// The joined text with its terminator.
    image: Mutex<Option<Vec<u8>>>,
}

impl Link {
    fn log(&self, error: &str) {
        let (n, options, values) = self.options;
        // SAFETY: the program keeps options and buffers as long as the link.
        unsafe { log(n, options as *const u32, values as *const *mut u8, error) };
    }

    fn add(&self, kind: u32, data: &[u8]) -> Result {
        /// `CU_JIT_INPUT_FATBINARY`
        const FAT_BINARY: u32 = 2;
        let mut terminated = data.to_vec();
        terminated.extend([0; 64]);
        // SAFETY: text ends in the terminator; the program vouches for other images.
        let Ok(Image::Ptx(input)) = (unsafe { fatbin::load(terminated.as_ptr(), 75) }) else {
            if kind == FAT_BINARY {
                // Machine code of the device runtime, which the simulated kernels do not call.
                return Ok(());
            }
            self.log("nvlink fatal   : an input is no PTX");
            return Err(errors::INVALID_IMAGE);
        };
        if let Err(e) = ptx::parse::parse(&input) {
            self.log(&format!("ptxas fatal   : {e}"));
            return Err(errors::INVALID_PTX);
        }
        let mut inputs = self.inputs.lock();
        inputs.push_str(&input);
        inputs.push('\n');
        Ok(())
    }
}

fn link(h: usize) -> Result<Arc<Link>> {
    driver()?;
    LINKS.get(h)
}

unsafe fn create(n: u32, options: *const u32, values: *const *mut u8, to: *mut usize) -> Result {
    working()?;
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let options = (n, options as usize, values as usize);
    // SAFETY: the program vouches for its pointer.
    unsafe {
        out(to, LINKS.insert(Arc::new(Link { options, inputs: Mutex::default(), image: Mutex::default() })))
    }
}

unsafe fn add_data(h: usize, kind: u32, data: *const u8, size: usize) -> Result {
    let link = link(h)?;
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its input.
    link.add(kind, unsafe { slice(data, size)? })
}

unsafe fn add_file(h: usize, kind: u32, path: *const c_char) -> Result {
    let link = link(h)?;
    // SAFETY: the program vouches for the path.
    let path = unsafe { text(path)? };
    link.add(kind, &std::fs::read(path).map_err(|_| errors::FILE_NOT_FOUND)?)
}

export! {
    fn cuLinkCreate(n: u32, options: *const u32, values: *const *mut u8, to: *mut usize) {
        create(n, options, values, to)
    }
    fn cuLinkCreate_v2(n: u32, options: *const u32, values: *const *mut u8, to: *mut usize) {
        create(n, options, values, to)
    }

    fn cuLinkAddData(h: usize, kind: u32, data: *const u8, size: usize, _name: *const c_char, _n: u32, _o: *const u32, _v: *const *mut u8) {
        add_data(h, kind, data, size)
    }
    fn cuLinkAddData_v2(h: usize, kind: u32, data: *const u8, size: usize, _name: *const c_char, _n: u32, _o: *const u32, _v: *const *mut u8) {
        add_data(h, kind, data, size)
    }

    fn cuLinkAddFile(h: usize, kind: u32, path: *const c_char, _n: u32, _o: *const u32, _v: *const *mut u8) {
        add_file(h, kind, path)
    }
    fn cuLinkAddFile_v2(h: usize, kind: u32, path: *const c_char, _n: u32, _o: *const u32, _v: *const *mut u8) {
        add_file(h, kind, path)
    }

    fn cuLinkComplete(h: usize, image: *mut *const u8, size: *mut usize) {
        let link = link(h)?;
        let inputs = link.inputs.lock().clone();
        if let Err(e) = ptx::compile(&inputs) {
            link.log(&format!("nvlink fatal   : {e}"));
            return Err(errors::INVALID_PTX);
        }
        link.log("");
        let mut linked = link.image.lock();
        let bytes = linked.get_or_insert_with(|| [inputs.as_bytes(), &[0]].concat());
        out_opt(size, bytes.len());
        out(image, bytes.as_ptr())
    }

    fn cuLinkDestroy(h: usize) {
        driver()?;
        LINKS.remove(h).map(drop)
    }
}
