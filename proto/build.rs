//! Compiles the control plane's `.proto` files (in pure Rust: no protoc needed) where the feature asks for it.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    if std::env::var_os("CARGO_FEATURE_CONTROL").is_some() {
        let files = protox::compile(["gpusession/v1/pool.proto"], ["proto"])?;
        tonic_prost_build::configure().compile_fds(files)?;
    }
    Ok(())
}
