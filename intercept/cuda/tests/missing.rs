//! `GPUSESSION_TRACE=missing`: prints each call and table that is not supported, and how often a
//! program used it.

use gpusession_test_support::cuda::{call, library, run};

gpusession_test_support::programs!(wants_much);

fn wants_much() {
    const NOT_SUPPORTED: i32 = 801;
    const INVALID_VALUE: i32 = 1;
    let library = library();
    for _ in 0..3 {
        assert_eq!(call(&library, "cuGraphicsUnregisterResource", &[0]), NOT_SUPPORTED);
    }
    assert_eq!(call(&library, "cuImportExternalMemory", &[0, 0]), NOT_SUPPORTED);
    let table = |id: u128| {
        let (mut table, id) = (std::ptr::null::<usize>(), id.to_be_bytes());
        let status = call(&library, "cuGetExportTable", &[&raw mut table as u64, id.as_ptr() as u64]);
        assert_eq!(table.is_null(), status != 0);
        if status == 0 { Ok(table) } else { Err(status) }
    };
    // A refused table, two unknown ones, and a present one with an empty slot.
    for _ in 0..2 {
        assert_eq!(table(0xf8cff951_21468b4e_b9e2fb46_9e7c0dd9), Err(INVALID_VALUE));
    }
    assert_eq!(table(0xdd9e98a4_f4104844_99b0e2ae_b7b432b5), Err(INVALID_VALUE));
    assert_eq!(table(7), Err(INVALID_VALUE));
    let tools = table(0x42d85a81_23f6cb47_8298f6e7_8a3aecdc).expect("TOOLS_TLS");
    // SAFETY: the table has three slots; the second is a function without parameters.
    unsafe {
        assert_eq!(tools.read(), 3 * size_of::<usize>());
        let slot: extern "C" fn() -> i32 = std::mem::transmute(tools.add(1).read());
        assert_eq!((slot(), slot()), (NOT_SUPPORTED, NOT_SUPPORTED));
    }
}

#[test]
fn unsupported_calls_are_counted() {
    let (output, _) = run("wants_much", Vec::new(), &[]);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    let wanted = [
        "1 cuImportExternalMemory",
        "1 private table 00000000000000000000000000000007 (unknown)",
        "1 private table dd9e98a4f410484499b0e2aeb7b432b5 HYBRID_CUDART",
        "2 private table f8cff95121468b4eb9e2fb469e7c0dd9 (unnamed)",
        "2 slot 1 of the private table TOOLS_TLS",
        "3 cuGraphicsUnregisterResource",
    ];
    for line in wanted {
        let name = line.split_once(' ').unwrap().1;
        assert_eq!(said.matches(&format!("gpusession: {name} is not supported")).count(), 1, "{said}");
        assert_eq!(said.matches(&format!("gpusession: not supported: {line}\n")).count(), 1, "{said}");
    }
    assert_eq!(said.matches("not supported:").count(), wanted.len(), "{said}");
    let (output, _) = run("wants_much", Vec::new(), &[("GPUSESSION_TRACE", "why,summary".into())]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("not supported"), "only if asked: {output:?}");
}
