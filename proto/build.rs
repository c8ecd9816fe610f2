//! Writes operation numbers from the table of driver calls, and compiles the `.proto` files.
//!
//! The latter serves the control plane, if its feature is on, and is pure Rust: no protoc needed.

use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;

use gpusession_calls::Class;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let mut operations = String::new();
    let mut names = String::new();
    let mut count = 0;
    let mut name_of = |number: u16, name: &str| {
        count = count.max(number + 1);
        writeln!(names, "        {number} => {name:?},")
    };
    for (number, gpusession_calls::Operation { name, .. }) in gpusession_calls::operations() {
        writeln!(operations, "#[allow(missing_docs)]\npub const {name}: u16 = {number};")?;
        name_of(number, name)?;
    }
    for (name, class) in gpusession_calls::calls() {
        if let Class::Generated { op, .. } = class {
            writeln!(
                operations,
                "#[allow(missing_docs, non_upper_case_globals)]\npub const {name}: u16 = {op};"
            )?;
            name_of(op, name)?;
        }
    }
    writeln!(
        operations,
        "/// Operations have numbers below this.\npub const COUNT: usize = {count};\n\
         /// Returns an operation's name, for people.\npub fn name(operation: u16) -> &'static str {{\n    match operation {{\n\
         {names}        _ => \"?\",\n    }}\n}}"
    )?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    std::fs::write(out.join("operations.rs"), operations)?;
    if std::env::var_os("CARGO_FEATURE_CONTROL").is_some() {
        let files = protox::compile(["gpusession/v1/pool.proto"], ["proto"])?;
        tonic_prost_build::configure().codec_path("crate::codec::Compact").compile_fds(files)?;
    }
    Ok(())
}
