//! Symbols that programs find in the library.

use std::collections::BTreeSet;
use std::process::Command;

use gpusession_test_support::cuda::library_file;

#[test]
fn every_symbol_of_the_driver_is_exported_and_little_beyond_them() {
    let output =
        Command::new("nm").args(["-D", "--defined-only"]).arg(library_file()).output().expect("binutils");
    assert!(output.status.success(), "{output:?}");
    let listed = String::from_utf8(output.stdout).unwrap();
    // A line of `nm` holds an address, a letter and a name.
    let exported: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let mut wanted = gpusession_calls::exported();
    wanted.extend(["gpusession_marker", "ncclTunerPlugin_v4", "ncclTunerPlugin_v5"]);
    let missing: Vec<_> = wanted.difference(&exported).collect();
    let more: Vec<_> = exported.difference(&wanted).collect();
    assert!(missing.is_empty() && more.is_empty(), "missing {missing:?}, beyond them {more:?}");
}
