//! Workers' questions about images: answered beside the supervisor's state, since they wait for the
//! disk.

use std::sync::Arc;

use gpusession_proto::supervise::{FromWorker, ToWorker};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tracing::debug;

use super::stock::WorkerId;
use super::supervisor::Supervisor;
use super::worker::{Command, hex};
use crate::cache::{Images, Incoming};
use crate::clock::wall;

/// Questions of one worker at a time; the server answers further ones with no.
const MAX_QUESTIONS: usize = 16;

/// The questions of one worker.
pub(super) struct ImageDesk {
    supervisor: Supervisor,
    id: WorkerId,
    /// Images of its client; `None`: this server keeps none.
    images: Option<(Arc<Images>, String)>,
    places: Arc<Semaphore>,
}

impl ImageDesk {
    pub(super) fn new(supervisor: &Supervisor, id: &WorkerId) -> Self {
        let client = supervisor.state().workers.get(id).map(|worker| worker.client.clone());
        let cache = supervisor.0.options.cache.as_ref();
        let images = cache.map(|cache| cache.images().clone()).zip(client);
        let places = Arc::new(Semaphore::new(MAX_QUESTIONS));
        Self { supervisor: supervisor.clone(), id: *id, images, places }
    }

    /// Takes a question about an image, and returns any other message.
    pub(super) fn take(&self, message: FromWorker) -> Option<FromWorker> {
        match message {
            FromWorker::ImageWanted { serial, hash } => match self.place() {
                Some((images, client, place)) => self.look_up(images, client, place, serial, hash),
                None => self.tell(Command::Tell(ToWorker::Image { serial, bytes: None })),
            },
            FromWorker::ImageOffered { serial, hash, bytes } => match self.place() {
                Some((images, client, place)) => {
                    self.store(serial, place, move || images.begin(&client, &hash, bytes, wall()));
                }
                None => self.tell(no_room(serial)),
            },
            message => return Some(message),
        }
        None
    }

    fn place(&self) -> Option<(Arc<Images>, String, OwnedSemaphorePermit)> {
        let (images, client) = self.images.clone()?;
        Some((images, client, self.places.clone().try_acquire_owned().ok()?))
    }

    fn look_up(
        &self,
        images: Arc<Images>,
        client: String,
        place: OwnedSemaphorePermit,
        serial: u64,
        hash: [u8; 32],
    ) {
        let tell = self.teller();
        spawn_blocking(move || {
            tell(match images.open(&client, &hash, wall()) {
                Some((file, bytes)) => {
                    Command::Give(ToWorker::Image { serial, bytes: Some(bytes) }, file.into())
                }
                None => Command::Tell(ToWorker::Image { serial, bytes: None }),
            });
            drop(place);
        });
    }

    /// Lets the worker write an image into a pipe, if `begin` finds room for it.
    fn store(
        &self,
        serial: u64,
        place: OwnedSemaphorePermit,
        begin: impl FnOnce() -> Option<Incoming> + Send + 'static,
    ) {
        let (tell, id) = (self.teller(), self.id);
        spawn_blocking(move || {
            let room = begin().and_then(|incoming| Some((incoming, pipe2(OFlag::O_CLOEXEC).ok()?)));
            match room {
                Some((incoming, (reader, writer))) => {
                    tell(Command::Give(ToWorker::ImageRoom { serial, room: true }, writer));
                    if let Err(e) = incoming.take(reader) {
                        debug!("worker {}: its image is not stored: {e}", hex(&id));
                    }
                }
                None => tell(no_room(serial)),
            }
            drop(place);
        });
    }

    fn tell(&self, command: Command) {
        self.teller()(command);
    }

    fn teller(&self) -> impl Fn(Command) + Send + 'static {
        let (supervisor, id) = (self.supervisor.clone(), self.id);
        move |command| {
            if let Some(worker) = supervisor.state().workers.get(&id) {
                let _ = worker.orders.tells.send(command);
            }
        }
    }
}

fn no_room(serial: u64) -> Command {
    Command::Tell(ToWorker::ImageRoom { serial, room: false })
}
