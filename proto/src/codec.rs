//! Encoding of the control plane's messages: protobuf with small buffers.
//!
//! The default buffers of tonic have 8 KiB as long as a call lasts, and each client has a call to
//! the server that lasts as long as the client.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// Initial size of a buffer, in bytes; most messages fit, longer ones enlarge it.
const BUFFER: usize = 256;
/// Bytes up to which messages that are ready at once are sent together.
const MAX_COALESCED: usize = 32 << 10;

/// Codec of protobuf messages with small buffers.
#[derive(Debug)]
pub struct Compact<T, U>(PhantomData<fn() -> (T, U)>);

impl<T, U> Default for Compact<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Compact<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::new(BUFFER, MAX_COALESCED))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(BUFFER, MAX_COALESCED))
    }
}
