//! The socket of the signer's own process.

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gpusession_proto::message;
use tracing::{debug, warn};

use super::keeper::{Caller, Keeper};
use super::link::receive;
use super::operation::{Operation, Outcome, Refused, Why};
use crate::peer::{Peer, Served};

/// Bound on each read and write of a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;

/// An open connection; dropping it subtracts it.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts connections until the process ends.
pub fn serve(listener: &UnixListener, keeper: &Arc<Keeper>, served: &Served) -> io::Result<()> {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let (socket, _) = listener.accept()?;
        if open.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            warn!(
                "signer socket: refused a connection: {MAX_CONNECTIONS} others are open; the caller tries again"
            );
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (keeper, served, counted) = (keeper.clone(), served.clone(), Counted(open.clone()));
        let started = std::thread::Builder::new().name("connection".into()).spawn(move || {
            let _counted = counted;
            if let Err(e) = answer(socket, &keeper, &served) {
                debug!("connection closed: {e}");
            }
        });
        if let Err(e) = started {
            warn!("signer socket: refused a connection: no thread for it: {e}; the caller tries again");
        }
    }
}

fn answer(mut socket: UnixStream, keeper: &Keeper, served: &Served) -> io::Result<()> {
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
                Err(Refused::new(Why::Request, format!("the signer does not know this request: {e}")))
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
