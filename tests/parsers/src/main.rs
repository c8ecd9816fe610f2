//! `fuzz-parser`: libFuzzer on the target that `PARSER` names; `tests/parsers/fuzz` runs it.
#![no_main]

use std::sync::LazyLock;

use gpusession_parsers::{Target, target};

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("PARSER").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("PARSER={name}: no such target"))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
