//! Messages to the task that owns the machine.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpusession_proto::control;
use gpusession_proto::grant::Denial;
use tokio::sync::{mpsc, oneshot};

use crate::leases::readings::Place;
use crate::leases::{
    Answer, Caller, Failure, Granted, Interruption, LeaseView, Session, Slot, Spec, Update, WorkerRequest,
};
use crate::pool::{PoolError, PoolServer, Trouble};

pub(super) enum Message {
    Create(Box<Spec>, oneshot::Sender<Result<LeaseView, PoolError>>),
    Want(Box<Spec>, oneshot::Sender<Slot>),
    Release(Slot, String, oneshot::Sender<bool>),
    Renew(String, Option<Duration>, oneshot::Sender<Result<Duration, PoolError>>),
    Grant(Caller, WorkerRequest, oneshot::Sender<Answer>),
    Places(Caller, WorkerRequest, oneshot::Sender<Result<Vec<Place>, (Denial, String)>>),
    DefaultSlots(Caller, oneshot::Sender<Vec<Slot>>),
    Interrupted(Granted, Interruption, Option<Duration>, oneshot::Sender<Option<String>>),
    Ended(Vec<Granted>),
    Outcome(Slot, u32, Option<Failure>),
    Resume(String, [u8; 16], oneshot::Sender<Option<Granted>>),
    Freed(Slot),
    Configure(Vec<Spec>, oneshot::Sender<()>),
    AllowClear(bool),
    Preallocate(u32, oneshot::Sender<()>),
    SessionOpened(Arc<Session>),
    Demand(Caller),
    SessionClosed(String),
    Drain(usize, Option<Duration>, oneshot::Sender<bool>),
    Remove(usize, Duration),
    Restore(usize),
    Warn(Duration, String, oneshot::Sender<usize>),
    Drained(oneshot::Sender<()>),
    Allocated(Slot, Result<(usize, control::Lease), PoolError>),
    Renewed(usize, Vec<String>, Duration, Result<control::RenewReply, PoolError>),
    Released(usize, String, Result<(), PoolError>),
    Withdrawn(usize, String, Result<(), PoolError>),
    Workers(Slot, String, Result<Vec<control::Worker>, PoolError>),
    Event(usize, control::PoolEvent),
    Described(usize, Duration, control::ServerDescription),
    Disconnected(usize),
    Reconnected(usize),
    Connect(Vec<Arc<dyn PoolServer>>),
    Notice(String),
    Server(usize, oneshot::Sender<Option<Arc<dyn PoolServer>>>),
    Holder(Slot, oneshot::Sender<Option<(Arc<dyn PoolServer>, String)>>),
}

pub(super) type Updates = Arc<Mutex<Vec<mpsc::UnboundedSender<Update>>>>;

pub(super) fn ended() -> PoolError {
    PoolError::new(Trouble::Unreachable, "request dropped: gpusessiond is stopping, or the session ended")
}
