//! Writes the exports without hand-written code from the table in `proto/nvml`.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "ends a build"
)]

use std::fmt::Write as _;
use std::path::PathBuf;

use gpusession_nvml_calls::{Class, calls};

fn main() {
    let mut out = String::new();
    for (index, call) in calls().iter().enumerate() {
        let name = call.name;
        match &call.class {
            Class::Local => continue,
            Class::Forward(..) if call.own_client => continue,
            Class::Forward(..) => {
                let names: Vec<String> = (0..call.arguments()).map(|i| format!("a{i}")).collect();
                let params: Vec<String> = names.iter().map(|n| format!("{n}: usize")).collect();
                writeln!(
                    out,
                    "/// # Safety\n/// Pointers are as NVML requires.\n#[unsafe(no_mangle)]\npub unsafe extern \"C\" fn {name}({}) -> u32 {{\n    \
                     // SAFETY: by NVML's contract the program's pointers fit this call.\n    unsafe {{ crate::entry::forward({index}, &[{}]) }}\n}}",
                    params.join(", "),
                    names.join(", ")
                )
            }
            Class::Denied(_) | Class::None(_) => writeln!(
                out,
                "#[unsafe(no_mangle)]\npub extern \"C\" fn {name}() -> u32 {{ crate::entry::refuse({index}) }}"
            ),
        }
        .expect("a string grows");
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(folder.join("exports.rs"), out).expect("the build folder is writable");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,defs");
    gpusession_glibc::link();
}
