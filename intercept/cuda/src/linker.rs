//! The driver's linker: inputs go to the worker, logs and the linked image come back.

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::entry::{INVALID_VALUE, Result, UNKNOWN};
use crate::jit::Options;
use crate::signatures::Signatures;
use crate::status::NO_BINARY_FOR_GPU;
use crate::{handles, images};

/// `CUjitInputType`: a fat binary, and the highest one.
const FAT_BINARY: i32 = 2;
const NVVM: i32 = 5;
/// Longest linked image, in bytes.
const MAX_IMAGE: u64 = 4 << 30;

/// One state of the linker.
pub struct Link {
    pub client: &'static Client,
    pub handle: u64,
    /// Options of the whole link, with the program's buffers for the logs.
    options: Options,
    inputs: Signatures,
    /// The linked image, which the program may read until it destroys the state.
    image: Option<Vec<u8>>,
}

// SAFETY: the addresses in `options` are of the program's buffers, which it keeps for every thread
// until it destroys the state.
unsafe impl Send for Link {}

impl Link {
    /// Adds an input to the link.
    pub fn add(&self, kind: i32, data: &[u8], label: &[u8], options: &Options) -> Result {
        if !(0..=NVVM).contains(&kind) || data.is_empty() {
            return Err(INVALID_VALUE);
        }
        let reply = images::with_image(self.client, data, |hash| {
            self.client.ask(op::LINK_ADD, |w| {
                w.word(self.handle);
                w.word(kind as u64);
                w.bytes(hash);
                w.bytes(label);
                options.write(w);
            })
        })?;
        self.options.give_outputs(self.options.logs(&reply)?);
        self.client.check_status(reply.status)?;
        self.inputs.add(data);
        Ok(())
    }

    /// Links the inputs and fetches the image.
    pub fn complete(&mut self) -> Result<&[u8]> {
        let client = self.client;
        if self.image.is_none() {
            let reply = client.ask(op::LINK_COMPLETE, |w| w.word(self.handle))?;
            let mut r = self.options.logs(&reply)?;
            let len = word(&mut r);
            self.options.give_outputs(r);
            client.check_status(reply.status)?;
            let len = len?;
            if len > MAX_IMAGE {
                return Err(UNKNOWN);
            }
            let mut image = Vec::new();
            while (image.len() as u64) < len {
                let reply = client.call(op::LINK_IMAGE, |w| {
                    w.word(self.handle);
                    w.word(image.len() as u64);
                })?;
                let mut r = reply.reader();
                let part = string(&mut r)?;
                if part.is_empty() || part.len() as u64 > len - image.len() as u64 {
                    return Err(UNKNOWN);
                }
                image.extend_from_slice(part);
            }
            self.inputs.are_inputs_of(&image);
            self.image = Some(image);
        }
        Ok(self.image.as_deref().unwrap_or_default())
    }
}

/// Creates a state of the linker in the current context.
pub fn create(client: &'static Client, options: Options) -> Result<Link> {
    let handle = client.mint(handle::LINK);
    let made = client.call(op::LINK_CREATE, |w| {
        w.word(handle);
        options.write(w);
    });
    made.inspect_err(|_| handles::retire(handle))?;
    Ok(Link { client, handle, options, inputs: Signatures::default(), image: None })
}

/// Links fat binaries for the current device, as the driver does for `nvcc -rdc=true`.
pub fn fat_binaries(client: &'static Client, parts: &[&[u8]]) -> Result<Vec<u8>> {
    let none = || Options::read(0, std::ptr::null(), std::ptr::null());
    let mut link = create(client, none()?)?;
    let mut linked = || {
        for part in parts {
            match link.add(FAT_BINARY, part, b"", &none()?) {
                // A part without code for the device, such as an unused library.
                Ok(()) | Err(NO_BINARY_FOR_GPU) => {}
                Err(status) => return Err(status),
            }
        }
        link.complete().map(<[u8]>::to_vec)
    };
    let linked = linked();
    handles::retire(link.handle);
    client.post(op::LINK_DESTROY, |w| w.word(link.handle))?;
    linked
}
