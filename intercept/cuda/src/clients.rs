//! All workers of the process, one for each of its leases, and the selection of a call's worker.
//!
//! A call belongs to the current context's client, unless a handle or an address among its
//! arguments belongs to another one.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gpusession_link::Events;
use gpusession_link::grant::{self, Grant};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::handle;
use gpusession_proto::readings::tell_apart;
use gpusession_proto::supervise::MPS_VARIABLES;

use crate::client::{Client, Failed, NEWEST};
use crate::devices::{self, Device};
use crate::handles::MAX_CLIENTS;
use crate::status::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, NO_DEVICE, NOT_INITIALIZED, NOT_PERMITTED, Result,
    SYSTEM_NOT_READY,
};
use crate::{thread, trace};

struct Clients {
    /// Client number 0, nearly always the only one.
    first: Client,
    more: Vec<Client>,
    /// The program's devices in its order: number of the client, ordinal on its worker.
    visible: Vec<(u8, u32)>,
    /// The daemon's grant; the end of its connection reports the process's exit.
    grant: Grant,
}

static CLIENTS: OnceLock<std::result::Result<Clients, i32>> = OnceLock::new();

extern "C" fn in_forked_child() {
    if let Some(Ok(clients)) = CLIENTS.get() {
        thread::set_forked();
        clients.all().for_each(|client| client.link.abandon());
    }
}

/// Tells the workers that the process exits; otherwise they would wait for it.
extern "C" fn at_exit() {
    if !thread::forked()
        && let Some(Ok(clients)) = CLIENTS.get()
    {
        clients.all().for_each(|client| client.link.bye());
    }
}

/// Runs after the handlers of `atexit` and other libraries' destructors, which may still call CUDA.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// Makes the receiver of a client's unsolicited frames, from the client's number.
pub type Receivers = fn(u8) -> Box<dyn Events>;

/// `cuInit`
pub fn init(receivers: Receivers) -> Result {
    if thread::forked() {
        return Err(NOT_INITIALIZED);
    }
    let clients = CLIENTS.get_or_init(|| {
        let clients = Clients::connect(receivers)?;
        // SAFETY: the handler takes no arguments and only stores flags, as a handler in a forked
        // child may.
        unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
        if trace::summary() {
            // SAFETY: the handler takes no arguments and reads counters of a static that is never
            // dropped.
            unsafe { libc::atexit(print_summary) };
        }
        Ok(clients)
    });
    clients.as_ref().map(|_| ()).map_err(|status| *status)
}

extern "C" fn print_summary() {
    if let Some(Ok(clients)) = CLIENTS.get() {
        clients.all().for_each(Client::print_summary);
    }
}

/// Returns the CUDA version that programs see; it never changes within a process.
///
/// Runtimes ask before `cuInit`, when no worker exists, and compare later. The daemon knows a
/// worker's version; without an answer it is [`NEWEST`].
pub fn driver_version() -> i32 {
    static REPORTED_VERSION: OnceLock<i32> = OnceLock::new();
    *REPORTED_VERSION.get_or_init(|| match CLIENTS.get() {
        Some(Ok(clients)) => clients.all().map(|c| c.driver_version).min().unwrap_or(NEWEST),
        Some(Err(_)) => NEWEST,
        None => grant::cuda_version().map_or(NEWEST, |version| NEWEST.min(version as i32)),
    })
}

#[inline]
fn initialized() -> Result<&'static Clients> {
    if thread::forked() {
        return Err(NOT_INITIALIZED);
    }
    match CLIENTS.get() {
        Some(Ok(clients)) => Ok(clients),
        Some(Err(status)) => Err(*status),
        None => Err(NOT_INITIALIZED),
    }
}

#[inline]
fn usable() -> Result<&'static Clients> {
    if thread::in_host_function() {
        return Err(NOT_PERMITTED);
    }
    initialized()
}

/// Returns the current context's client, or the first one without a context.
///
/// An error before `cuInit`, in a forked child and in a host function of a stream.
#[inline]
pub fn get() -> Result<&'static Client> {
    Ok(usable()?.current())
}

/// Returns the client as [`get`] does, for the few calls that a host function may make.
#[inline]
pub fn even_in_host_function() -> Result<&'static Client> {
    Ok(initialized()?.current())
}

/// Returns a client by number, for the link's own threads; none before `cuInit` has succeeded.
pub fn by_number(number: u8) -> Option<&'static Client> {
    CLIENTS.get()?.as_ref().ok()?.by_number(number)
}

/// Reports a lost worker to the daemon, which shows it to people.
///
/// Before `cuInit` has succeeded it has no effect, because [`init`] reports the failure itself.
pub fn lost(number: u8, reason: &str) {
    if let Some(Ok(clients)) = CLIENTS.get() {
        clients.grant.lost(number.into(), reason);
    }
}

/// Returns `true` if the program has several clients.
#[inline]
pub fn several() -> bool {
    matches!(CLIENTS.get(), Some(Ok(clients)) if !clients.more.is_empty())
}

/// Returns all clients; a library, which belongs to no context, is on each.
pub fn all() -> Result<impl Iterator<Item = &'static Client>> {
    Ok(usable()?.all())
}

/// Returns the client of a handle, or of an object's name that [`Client::name`] made.
pub fn by_object(object: u64) -> Result<&'static Client> {
    let clients = usable()?;
    if clients.more.is_empty() {
        // With one client names pass unchanged, and a driver may use any bits of them.
        return Ok(&clients.first);
    }
    clients.by_number(handle::server(object)).ok_or(INVALID_HANDLE)
}

/// Returns the client of a context, and the context's device.
pub fn of_context(ctx: u64) -> Result<(&'static Client, &'static Device)> {
    let client = usable()?.by_number(handle::server(ctx)).ok_or(INVALID_CONTEXT)?;
    Ok((client, client.device_of(ctx)?))
}

/// Returns the program's device with this ordinal, and its client.
pub fn device(ordinal: i32) -> Result<(&'static Client, &'static Device)> {
    let clients = usable()?;
    let place = usize::try_from(ordinal).ok().and_then(|i| clients.visible.get(i));
    clients.device(*place.ok_or(INVALID_DEVICE)?)
}

/// Returns the program's devices in its order.
pub fn devices() -> Result<impl ExactSizeIterator<Item = &'static Device>> {
    let clients = usable()?;
    let devices: Vec<_> =
        clients.visible.iter().map(|place| clients.device(*place).map(|(_, d)| d)).collect::<Result<_>>()?;
    Ok(devices.into_iter())
}

/// Returns the program's variables for MPS, which act on the GPU's host, within the lease's limits.
fn limits() -> Vec<(String, String)> {
    let set = |name: &&str| Some((name.to_string(), std::env::var(name).ok().filter(|v| v.len() <= 256)?));
    MPS_VARIABLES.iter().filter_map(set).collect()
}

/// Time since the first worker that did not answer during which another request may follow.
///
/// A worker may exit between grant and greeting, for example with its MPS server, and the next one
/// serves. A server that restarts, or a connection that breaks, is back within this time, too. The
/// wait for the first worker does not count: on a busy server it takes long.
const GRANT_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before the second request; each later pause is longer by the same, up to the bound.
const GRANT_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_GRANT_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Opens a client for each endpoint.
///
/// If one fails, closes those that are open, and returns the number of the failed one.
fn open(endpoints: &[Endpoint], receivers: Receivers) -> std::result::Result<Vec<Client>, (u8, Failed)> {
    if endpoints.len() > MAX_CLIENTS {
        trace::why(&format!(
            "{} leases: a program can use {MAX_CLIENTS}; the others stay unused",
            endpoints.len()
        ));
    }
    let one = |(number, endpoint)| {
        Client::open(endpoint, number, receivers(number)).map_err(|failed| (number, failed))
    };
    (0..).zip(endpoints.iter().take(MAX_CLIENTS)).map(one).collect()
}

impl Clients {
    fn connect(receivers: Receivers) -> Result<Self> {
        let mut failed_at = None;
        let mut pause = GRANT_RETRY_INTERVAL;
        loop {
            let grant = grant::ask(limits()).map_err(|refused| {
                trace::why(&refused.reason);
                refused.denial.cuda_error()
            })?;
            match open(&grant.endpoints, receivers) {
                Ok(clients) => {
                    grant.served();
                    return Self::new(clients, grant);
                }
                Err((number, Failed { status, reason })) => {
                    trace::why(&reason);
                    let since = failed_at.get_or_insert_with(Instant::now).elapsed();
                    let again = status.is_none() && since + pause <= GRANT_TIMEOUT;
                    grant.unserved(number.into(), &reason, again);
                    if !again {
                        return Err(status.unwrap_or(SYSTEM_NOT_READY));
                    }
                }
            }
            #[expect(clippy::disallowed_methods, reason = "cuInit waits for the daemon")]
            std::thread::sleep(pause);
            pause = (pause + GRANT_RETRY_INTERVAL).min(MAX_GRANT_RETRY_INTERVAL);
        }
    }

    fn new(mut clients: Vec<Client>, grant: Grant) -> Result<Self> {
        let mut devices: Vec<_> =
            clients.iter_mut().flat_map(|c| c.devices.iter_mut().map(|d| (c.number, d))).collect();
        let pci: Vec<_> =
            devices.iter().map(|(_, d)| (d.uuid, String::from_utf8_lossy(&d.pci).into_owned())).collect();
        let apart = tell_apart(pci.iter().map(|(uuid, pci)| (*uuid, pci.as_str())));
        for ((_, device), (uuid, more)) in devices.iter_mut().zip(apart) {
            device.told_apart(uuid, more);
        }
        let uuids: Vec<_> = devices.iter().map(|(_, d)| d.uuid).collect();
        let wanted = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let mut visible = Vec::new();
        for (ordinal, place) in (0..).zip(devices::visible(wanted.as_deref(), &uuids)) {
            let (number, device) = &mut devices[place];
            device.ordinal = ordinal;
            visible.push((*number, device.local));
        }
        if visible.is_empty() {
            trace::why("CUDA_VISIBLE_DEVICES: names none of the program's GPUs; unset it to use them all");
            return Err(NO_DEVICE);
        }
        let more = clients.split_off(1);
        let first = clients.pop().ok_or(INVALID_DEVICE)?;
        Ok(Self { first, more, visible, grant })
    }

    fn all(&self) -> impl Iterator<Item = &Client> {
        std::iter::once(&self.first).chain(&self.more)
    }

    fn by_number(&self, number: u8) -> Option<&Client> {
        match number {
            0 => Some(&self.first),
            number => self.more.get(usize::from(number) - 1),
        }
    }

    #[inline]
    fn current(&self) -> &Client {
        if self.more.is_empty() {
            return &self.first;
        }
        self.by_number(handle::server(thread::current())).unwrap_or(&self.first)
    }

    fn device(&self, (number, local): (u8, u32)) -> Result<(&Client, &Device)> {
        let client = self.by_number(number).ok_or(INVALID_DEVICE)?;
        Ok((client, client.devices.get(local as usize).ok_or(INVALID_DEVICE)?))
    }
}
