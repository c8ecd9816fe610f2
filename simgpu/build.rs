//! Links the library under the driver's name, and generates code from the table of symbols: the
//! functions that are not simulated, the list of those that gpusession serves, the table of
//! `cuGetProcAddress`, and the names and texts of errors.

use std::collections::BTreeSet;
use std::path::Path;

use gpusession_calls::Class;
use gpusession_calls::tables::{Library, tables_source};

/// Collects the names defined by `export!` blocks: `fn cuName(` and `fn cuName | cuName_ptsz(`.
fn defined(text: &str, out: &mut BTreeSet<String>) {
    for line in text.lines() {
        let Some(rest) = line.trim_start().strip_prefix("fn cu") else { continue };
        let Some((names, _)) = rest.split_once('(') else { continue };
        let mut names = names.split('|').map(str::trim);
        if let Some(first) = names.next() {
            out.insert(format!("cu{first}"));
        }
        out.extend(names.map(str::to_owned));
    }
}

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    gpusession_glibc::link();
    println!("cargo:rerun-if-changed=src/exports");
    println!("cargo:rerun-if-changed=../proto/calls");
    let mut implemented = BTreeSet::new();
    for file in std::fs::read_dir("src/exports").expect("src/exports") {
        let text = std::fs::read_to_string(file.expect("entry").path()).expect("source");
        defined(&text, &mut implemented);
    }
    let known = gpusession_calls::exported();
    for name in implemented.iter().filter(|n| !known.contains(n.as_str())) {
        println!("cargo:warning={name} is not a symbol of the driver");
    }
    let out = std::env::var("OUT_DIR").expect("OUT_DIR");
    let write = |name: &str, text: String| std::fs::write(Path::new(&out).join(name), text).expect("write");
    write("unsupported.rs", gpusession_calls::unsupported_source(&implemented));
    let calls = gpusession_calls::calls();
    let served = calls.iter().filter(|(_, class)| !matches!(class, Class::None(_))).map(|(name, _)| *name);
    let unsimulated: Vec<_> = served.filter(|name| !implemented.contains(*name)).collect();
    write("unsimulated.rs", format!("const UNSIMULATED: &[&str] = &{unsimulated:?};"));
    write("proc_addresses.rs", gpusession_calls::proc_addresses_source());
    write("errors.rs", gpusession_calls::errors_source());
    write("export_tables.rs", tables_source(Library::Simgpu));
}
