//! NVRTC's private table for compiled code, used as NVRTC uses it.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use gpusession_test_support::cuda::library;

const TABLE: u128 = 0xda9151d3_3ae6cc41_a5c04f26_d533e328;

type Open = unsafe extern "C" fn(
    *mut *mut c_void,
    i32,
    *const c_void,
    usize,
    *const c_char,
    *const c_char,
    *const c_char,
    i32,
) -> i32;
type Close = unsafe extern "C" fn(*mut c_void) -> i32;
type Find = unsafe extern "C" fn(*mut c_void, u64, *mut *mut c_void, *mut u32) -> i32;
type Store = unsafe extern "C" fn(*mut c_void, u64, *const c_void, usize) -> i32;
type Free = unsafe extern "C" fn(*mut c_void) -> i32;

/// Plays the compiler's side of one compilation; returns whether the cache had the code, or `None`
/// without a cache.
fn compiled(table: *const usize, input: &[u8], options: &CStr) -> Option<bool> {
    // SAFETY: the assertion proves seven slots, and the casts use the types that NVRTC gives these
    // slots.
    unsafe {
        assert_eq!(*table, 7 * size_of::<usize>());
        let open: Open = std::mem::transmute(*table.add(1));
        let close: Close = std::mem::transmute(*table.add(2));
        let find: Find = std::mem::transmute(*table.add(3));
        let store: Store = std::mem::transmute(*table.add(4));
        let free: Free = std::mem::transmute(*table.add(6));
        let (host, build) = (c"HOST64".as_ptr(), c"Aug 20 2025".as_ptr());
        let mut entry = std::ptr::null_mut();
        let opened =
            open(&mut entry, 2, input.as_ptr().cast(), input.len(), options.as_ptr(), host, build, 90);
        if opened != 0 {
            return None;
        }
        let (mut value, mut len) = (std::ptr::null_mut(), 0);
        let hit = find(entry, 0, &mut value, &mut len) == 0;
        if hit {
            let found = std::slice::from_raw_parts(value.cast::<u8>(), len as usize);
            assert_eq!(found, [options.to_bytes(), input].concat());
            assert_eq!(free(value), 0);
        } else {
            let value = [options.to_bytes(), input].concat();
            assert_eq!(store(entry, 0, value.as_ptr().cast(), value.len()), 0);
        }
        assert_eq!(close(entry), 0);
        Some(hit)
    }
}

gpusession_test_support::programs!(compiles);

/// A program of its own, because it depends on the environment.
fn compiles() {
    type GetExportTable = unsafe extern "C" fn(*mut *const c_void, *const [u8; 16]) -> i32;
    let library = library();
    let mut table = std::ptr::null();
    // SAFETY: the type is that of CUDA's `cuGetExportTable`, and both pointers are valid for the
    // call.
    let status = unsafe {
        library.get::<GetExportTable>(b"cuGetExportTable").unwrap()(&mut table, &TABLE.to_be_bytes())
    };
    assert_eq!(status, 0);
    let table = table.cast();
    let hits = [
        compiled(table, b"source", c"-arch=sm_90"),
        compiled(table, b"source", c"-arch=sm_80"),
        compiled(table, b"other", c"-arch=sm_90"),
        compiled(table, b"source", c"-arch=sm_90"),
    ];
    println!("{hits:?}");
}

fn hits(folder: &Path, disable: &str) -> String {
    let output = gpusession_test_support::program("compiles")
        .env("CUDA_CACHE_PATH", folder)
        .env("CUDA_CACHE_DISABLE", disable)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said.lines().find_map(|line| Some(line[line.find('[')?..].to_string())).unwrap()
}

#[test]
fn compiled_once() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(hits(folder.path(), "0"), "[Some(false), Some(false), Some(false), Some(true)]");
    assert_eq!(hits(folder.path(), "0"), "[Some(true), Some(true), Some(true), Some(true)]");
    assert_eq!(hits(folder.path(), "1"), "[None, None, None, None]");
    let files = std::fs::read_dir(folder.path().join("gpusession/compiled")).unwrap();
    assert_eq!(files.count(), 3);
    // With a folder that cannot be written, the cache still works in memory.
    assert_eq!(hits(Path::new("/proc/nowhere"), "0"), "[Some(false), Some(false), Some(false), Some(true)]");
}
