//! Prints `docs/coverage-nvml.md` (`make docs`).

use std::io::Write;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(gpusession_nvml_calls::coverage().as_bytes())
}
