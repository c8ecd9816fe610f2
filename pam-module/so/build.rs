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
}
