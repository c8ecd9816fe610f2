//! Writes the seeds of all targets into a folder, one folder each; prints the targets' names.
//!
//! `cargo run -p gpusession-parsers --example seeds -- FOLDER`

use std::path::PathBuf;

use gpusession_parsers::TARGETS;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("FOLDER"));
    for target in TARGETS {
        let folder = folder.join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
        println!("{}", target.name);
    }
    Ok(())
}
