//! How the control plane's messages are encoded: protobuf, with buffers of their size. Those of tonic have 8 KiB for as long as a
//! call lasts, and a server has a call of each client that lasts as long as the client does.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// What most messages fit in; longer ones make the buffer grow.
const BUFFER: usize = 256;
/// Messages that are ready at once are sent together up to this size.
const TOGETHER: usize = 32 << 10;

/// See the module.
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
        ProstEncoder::new(BufferSettings::new(BUFFER, TOGETHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(BUFFER, TOGETHER))
    }
}
