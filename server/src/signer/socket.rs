//! The socket of the signer's own process.

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::message;
use tracing::warn;

use super::keeper::{Caller, Keeper};
use super::operation::{Operation, Outcome, Refused, UNREAD, Why};
use crate::local_service::{self, receive};
use crate::peer::{Peer, Served};

/// Bound on each read and write of a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;

/// Accepts connections until the process ends.
pub fn serve(listener: &UnixListener, keeper: &Arc<Keeper>, served: &Served) -> io::Result<()> {
    let (keeper, served) = (keeper.clone(), served.clone());
    local_service::accept(listener, "signer socket", MAX_CONNECTIONS, move |s| answer(s, &keeper, &served))
}

pub(super) fn answer(mut socket: UnixStream, keeper: &Keeper, served: &Served) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE_TIMEOUT))?;
    socket.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let caller = served.peer(&socket)?.map(|peer| match peer {
        Peer::Root => Caller::Root,
        Peer::Server => Caller::Server,
    });
    let outcome: Outcome = match caller {
        Ok(caller) => match receive::<Operation>(&mut socket) {
            Ok(operation) => keeper.perform(caller, operation),
            Err(e) if e.kind() == io::ErrorKind::Other => {
                Err(Refused::new(Why::Request, format!("{UNREAD}: {e}")))
            }
            Err(e) => return Err(e),
        },
        Err(why) => {
            warn!("signer socket: refused a caller: {why}");
            let text =
                format!("the signer answers root and the server alone: {why}; run the command as root");
            Err(Refused::new(Why::Right, text))
        }
    };
    let bytes = message::encode(&outcome);
    socket.write_all(&bytes)
}
