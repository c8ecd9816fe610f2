//! The library as programs load it.

use std::path::PathBuf;

use libloading::Library;

/// The library that was built together with this test.
pub fn library() -> Library {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libgpusession_cuda.so"))
        .find(|path| path.exists())
        .expect("libgpusession_cuda.so beside the test");
    // SAFETY: the library has no initialisers.
    unsafe { Library::new(path) }.unwrap()
}
