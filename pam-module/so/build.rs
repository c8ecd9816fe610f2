//! How the module is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in [
        // By its file, so that no development package is needed.
        "-l:libpam.so.0",
        // PAM unloads modules; what Rust has registered with the thread must not dangle.
        "-Wl,-z,nodelete",
    ] {
        println!("cargo::rustc-link-arg-cdylib={argument}");
    }
    // What the standard library calls here that is newer than glibc 2.28; a module names no function that starts threads.
    let newer =
        ["fstat64", "gettid", "pthread_key_create", "pthread_key_delete", "pthread_setspecific", "stat64"];
    gpusession_glibc::link_only(|name| newer.contains(&name));
}
