//! Linker arguments of the module.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in [
        // The library's file name, so that the build needs no development package.
        "-l:libpam.so.0",
        // PAM unloads modules, but Rust's standard library registers destructors with threads.
        "-Wl,-z,nodelete",
    ] {
        println!("cargo::rustc-link-arg-cdylib={argument}");
    }
    // Functions newer than glibc 2.28 that the standard library calls. The module must not name
    // functions that start threads, so it cannot redirect all.
    let newer =
        ["fstat64", "gettid", "pthread_key_create", "pthread_key_delete", "pthread_setspecific", "stat64"];
    gpusession_glibc::link_only(|name| newer.contains(&name));
}
