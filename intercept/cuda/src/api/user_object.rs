//! User objects: values of the program that graphs keep, until a destructor of the program runs.

use std::ffi::c_void;

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::entry::{INVALID_VALUE, driver, give};
use crate::host_functions::{self, HostFunction};
use crate::{clients, handles};

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which a program must set.
const NO_DESTRUCTOR_SYNC: u32 = 1;

driver! {
    fn cuUserObjectCreate(
        object: *mut *mut c_void, data: *mut c_void, destroy: Option<extern "C" fn(*mut c_void)>, references: u32, flags: u32,
    ) {
        let client = clients::get()?;
        let destroy = destroy.ok_or(INVALID_VALUE)?;
        let possible = (1..=i32::MAX as u32).contains(&references);
        if object.is_null() || !possible || flags != NO_DESTRUCTOR_SYNC {
            return Err(INVALID_VALUE);
        }
        let new = client.mint(handle::USER_OBJECT);
        let id = host_functions::register(client, HostFunction::Destructor(destroy, data as usize, new), None)?;
        let made = client.call(op::USER_OBJECT_CREATE, |w| {
            w.word(new);
            w.word(id);
            w.word(u64::from(references));
        });
        made.inspect_err(|_| {
            host_functions::unregister(id);
            handles::retire(new);
        })?;
        give(object, new as *mut c_void)
    }
}
