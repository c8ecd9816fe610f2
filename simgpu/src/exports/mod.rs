//! The exported functions of the driver.

pub mod array;
pub mod checkpoint;
pub mod context;
pub mod copy;
pub mod core_dump;
pub mod device;
pub mod graph;
pub mod green;
pub mod ipc;
pub mod launch;
pub mod link;
pub mod memory;
pub mod misc;
pub mod module;
pub mod node;
pub mod pool;
pub mod stream;
pub mod tensor_map;
pub mod texture;
pub mod texture_reference;
pub mod vmm;

pub use crate::entry::{guard, out, out_opt};
use crate::errors::{INVALID_VALUE, Result};

/// Reads a structure; null is an error.
///
/// # Safety
/// `p` is null or points to a `T`.
pub unsafe fn read<T: Copy>(p: *const T) -> Result<T> {
    if p.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for `p`.
    Ok(unsafe { p.read_unaligned() })
}

/// Reads a C string; null is an error.
///
/// # Safety
/// `p` is null or a C string.
pub unsafe fn text<'a>(p: *const std::ffi::c_char) -> Result<&'a str> {
    if p.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for `p`.
    unsafe { std::ffi::CStr::from_ptr(p) }.to_str().map_err(|_| INVALID_VALUE)
}

/// Returns the elements of an array, which may be null if it is empty.
///
/// # Safety
/// `p` points to `n` elements, or `n` is 0.
pub unsafe fn slice<'a, T>(p: *const T, n: usize) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    if p.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for `p` and `n`.
    Ok(unsafe { std::slice::from_raw_parts(p, n) })
}

/// Fills an array; `count` is its capacity on entry, and the number of existing items on return.
///
/// # Safety
/// `list` is null or has room for `*count` elements.
pub unsafe fn fill<T: Copy>(list: *mut T, count: *mut usize, items: &[T]) -> Result {
    // SAFETY: the caller vouches for both pointers.
    unsafe {
        if list.is_null() {
            return out(count, items.len());
        }
        let room = read(count)?;
        for (i, item) in items.iter().take(room).enumerate() {
            list.add(i).write_unaligned(*item);
        }
        // Entries after the last item are cleared; `count` tells them from items.
        for i in items.len()..room {
            list.cast::<u8>().add(i * size_of::<T>()).write_bytes(0, size_of::<T>());
        }
        out(count, items.len().min(room))
    }
}

/// Defines exported functions.
///
/// `fn name | twin(...)` also defines the variant for per-thread default streams, in which
/// `PER_THREAD` is true. Bodies run inside `unsafe`: the program vouches for its pointers.
#[macro_export]
macro_rules! export {
    (@one $name:ident ($($a:ident : $t:ty),* $(,)?) $body:block $per_thread:literal) => {
        /// See NVIDIA's documentation of the driver call of this name.
        ///
        /// # Safety
        /// Pointers are as that documentation demands.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::macro_metavars_in_unsafe)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($a: $t),*) -> u32 {
            #[allow(dead_code)]
            const PER_THREAD: bool = $per_thread;
            $crate::exports::guard(stringify!($name), || -> $crate::errors::Result {
                #[allow(unused_unsafe)]
                // SAFETY: the program vouches for its arguments, as with NVIDIA's driver.
                unsafe { $body }
            })
        }
    };
    (fn $name:ident | $twin:ident $args:tt $body:block $($rest:tt)*) => {
        $crate::export!(@one $name $args $body false);
        $crate::export!(@one $twin $args $body true);
        $crate::export!($($rest)*);
    };
    (fn $name:ident $args:tt $body:block $($rest:tt)*) => {
        $crate::export!(@one $name $args $body false);
        $crate::export!($($rest)*);
    };
    () => {};
}

#[cfg(test)]
mod tests {
    include!(concat!(env!("OUT_DIR"), "/unsimulated.rs"));

    /// Calls that gpusession serves and no program can try on this driver, which answers 801.
    const LEFT_OUT: &[(&str, &str)] = &[
        ("sparse arrays, as configuration.md says", "cuMemMapArrayAsync"),
        (
            "copies in batches and with attributes",
            "cuMemcpy3DWithAttributesAsync cuMemcpyWithAttributesAsync cuMemBatchDecompressAsync",
        ),
        (
            "prefetches in batches",
            "cuMemPrefetchBatchAsync cuMemDiscardBatchAsync cuMemDiscardAndPrefetchBatchAsync",
        ),
        (
            "old forms, and calls that few programs have",
            "cuGraphNodeGetContainingGraph cuGraphNodeGetParams cuLaunchHostFunc_v2 cuMemHostRegister \
             cuMemRangeGetAttributes",
        ),
    ];

    #[test]
    fn each_call_that_is_served_is_simulated_or_left_out() {
        let left_out: Vec<_> = LEFT_OUT.iter().flat_map(|(_, names)| names.split_whitespace()).collect();
        for name in UNSIMULATED {
            assert!(left_out.contains(name), "{name}: export it, or name it in LEFT_OUT");
        }
        for name in left_out {
            assert!(UNSIMULATED.contains(&name), "{name} is simulated, or not served: not of LEFT_OUT");
        }
    }
}
