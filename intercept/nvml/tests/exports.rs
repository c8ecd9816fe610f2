//! The library as programs load it.

use std::path::PathBuf;

use gpusession_nvml_calls::calls;
use libloading::Library;

/// Loads the library that cargo built together with this test.
fn library() -> Library {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libgpusession_nvml.so"))
        .find(|path| path.exists())
        .expect("libgpusession_nvml.so beside the test");
    // SAFETY: the library has no initializers, so loading it runs no code.
    unsafe { Library::new(path) }.unwrap()
}

#[test]
fn every_symbol_is_exported() {
    let library = library();
    // SAFETY: the symbol is only looked up, never used.
    let has = |name: &str| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok();
    let missing: Vec<&str> = calls().iter().map(|c| c.name).filter(|name| !has(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(["nvmlErrorString", "nvmlInternalGetExportTable", "gpusession_marker"].into_iter().all(has));
}

gpusession_test_support::programs!(without_a_daemon);

/// A program of its own, because it depends on the environment.
fn without_a_daemon() {
    let library = library();
    type Init = unsafe extern "C" fn() -> u32;
    type Set = unsafe extern "C" fn(usize, u32) -> u32;
    // SAFETY: the types are those of NVML; the library does not dereference handles.
    unsafe {
        assert_eq!(library.get::<Init>(b"nvmlShutdown").unwrap()(), 1);
        assert_eq!(library.get::<Init>(b"nvmlInit_v2").unwrap()(), 9);
        assert_eq!(library.get::<Set>(b"nvmlDeviceSetPersistenceMode").unwrap()(0, 0), 4);
        assert_eq!(library.get::<Set>(b"nvmlDeviceGetNumaNodeId").unwrap()(0, 0), 3);
    }
}

#[test]
fn without_a_daemon_the_driver_is_not_loaded_and_the_reason_is_printed() {
    let output = gpusession_test_support::program("without_a_daemon")
        .env("GPUSESSION_SOCKET", "/nonexistent/grant.sock")
        .env("GPUSESSION_TRACE", "why")
        .env_remove("GPUSESSION_TRACE_FILE")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
    assert!(said.contains("no daemon at /nonexistent/grant.sock"), "{said}");
}
