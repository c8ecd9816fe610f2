//! Bounded slots for unauthenticated connections, shared fairly between source addresses.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

/// A bounded number of slots, of which one machine has at most half.
///
/// A machine with its half replaces its own oldest connection, once that is old enough. If all
/// slots are taken, a newcomer gets the oldest slot of the machine with the most slots, provided
/// that this one has more than the newcomer's would have. Otherwise it waits for a free slot, or
/// until the oldest slot of all is old enough to be taken.
#[derive(Clone)]
pub struct PeerSlots(Arc<Inner>);

struct Inner {
    most: usize,
    /// Age at which a machine loses a slot to another one with as many slots.
    patience: Duration,
    places: Mutex<Places>,
    freed: Notify,
}

#[derive(Default)]
struct Places {
    count: usize,
    next: u64,
    /// Taken slots by machine, the oldest first.
    held: HashMap<IpAddr, VecDeque<Held>>,
}

struct Held {
    number: u64,
    since: Instant,
    /// Dropped when another connection takes the slot.
    _holder: oneshot::Sender<()>,
}

/// A slot, which is free again when this is dropped.
///
/// As a future, it is ready when another connection has taken the slot.
pub struct Place {
    slots: PeerSlots,
    address: IpAddr,
    number: u64,
    /// `None` once the slot is lost.
    held: Option<oneshot::Receiver<()>>,
}

/// Returns the machine of an address: for IPv6, the network of 64 bits.
pub fn machine(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

impl PeerSlots {
    /// Creates `most` slots, each of which is safe from its equals for `patience`.
    pub fn new(most: usize, patience: Duration) -> Self {
        Self(Arc::new(Inner { most, patience, places: Mutex::default(), freed: Notify::new() }))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.0.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot, after a wait if necessary.
    ///
    /// `None` if the machine has its half of the slots, and none of them is old enough.
    pub async fn enter(&self, peer: IpAddr) -> Option<Place> {
        let address = machine(peer);
        loop {
            let freed = self.0.freed.notified();
            let at = {
                let mut places = self.places();
                match places.room(&self.0, address) {
                    Room::Now => {
                        let (number, held) = places.add(address);
                        return Some(Place { slots: self.clone(), address, number, held: Some(held) });
                    }
                    Room::From(at) => at,
                    Room::None => return None,
                }
            };
            let _ = timeout_at(at, freed).await;
        }
    }
}

enum Room {
    Now,
    /// From this time on, or earlier if a slot is freed.
    From(Instant),
    None,
}

impl Places {
    /// Makes room for one more connection of a machine.
    fn room(&mut self, slots: &Inner, address: IpAddr) -> Room {
        let now = Instant::now();
        let oldest = |held: &VecDeque<Held>| held.front().map(|h| h.since + slots.patience);
        let mine = self.held.get(&address);
        let count = mine.map_or(0, VecDeque::len);
        let victim = match mine.and_then(oldest) {
            Some(old) if count >= slots.most.div_ceil(2) => {
                if now < old {
                    return Room::None;
                }
                address
            }
            _ if self.count < slots.most => return Room::Now,
            _ => {
                let most = self.held.iter().max_by_key(|(_, held)| held.len());
                match most.filter(|(_, held)| held.len() > count + 1) {
                    Some((victim, _)) => *victim,
                    None => {
                        let oldest = self.held.iter().filter_map(|(a, held)| Some((oldest(held)?, *a))).min();
                        match oldest {
                            Some((at, _)) if now < at => return Room::From(at),
                            Some((_, victim)) => victim,
                            None => return Room::None,
                        }
                    }
                }
            }
        };
        if let Some(number) = self.held.get(&victim).and_then(VecDeque::front).map(|h| h.number) {
            self.remove(victim, number);
        }
        Room::Now
    }

    fn add(&mut self, address: IpAddr) -> (u64, oneshot::Receiver<()>) {
        let (holder, lost) = oneshot::channel();
        let number = self.next;
        self.next += 1;
        self.count += 1;
        self.held.entry(address).or_default().push_back(Held {
            number,
            since: Instant::now(),
            _holder: holder,
        });
        (number, lost)
    }

    fn remove(&mut self, address: IpAddr, number: u64) {
        let Some(held) = self.held.get_mut(&address) else { return };
        let before = held.len();
        held.retain(|h| h.number != number);
        self.count -= before - held.len();
        if held.is_empty() {
            self.held.remove(&address);
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Place").field(&self.address).field(&self.number).finish()
    }
}

impl Future for Place {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(held) = &mut self.held {
            let _ = std::task::ready!(Pin::new(held).poll(cx));
            self.held = None;
        }
        Poll::Ready(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.slots.places().remove(self.address, self.number);
        self.slots.0.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Polls a future once; `None` if it is not ready.
    async fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        tokio::select! { biased; out = future => Some(out), () = async {} => None }
    }

    #[tokio::test]
    async fn the_machine_with_most_slots_loses_its_oldest() {
        let slots = PeerSlots::new(6, LONG);
        let enter = async |host: &str| slots.enter(ip(host)).await;
        let mut loud = Vec::new();
        for host in ["2001:db8::1", "2001:db8::2", "2001:db8::3"] {
            loud.push(enter(host).await.unwrap());
        }
        assert!(enter("2001:db8::4").await.is_none(), "it has its half");
        let mut calm = enter("10.0.0.1").await.unwrap();
        let mut other = [enter("10.0.0.2").await.unwrap(), enter("::ffff:10.0.0.2").await.unwrap()];
        let mut again = enter("10.0.0.1").await.unwrap();
        assert_eq!(now(&mut loud[0]).await, Some(()), "the oldest of the three");
        assert!(now(Box::pin(enter("10.0.0.1"))).await.is_none(), "nobody has more than who comes");
        for place in loud[1..].iter_mut().chain(&mut other).chain([&mut calm, &mut again]) {
            assert_eq!(now(place).await, None);
        }
    }

    #[tokio::test]
    async fn equals_wait_for_a_place_or_for_the_oldest() {
        let slots = PeerSlots::new(2, LONG);
        let enter = async |host: &str| slots.enter(ip(host)).await.unwrap();
        let (a, mut b) = (enter("10.0.0.1").await, enter("10.0.0.2").await);
        let mut third = Box::pin(enter("10.0.0.3"));
        assert!(now(&mut third).await.is_none(), "it waits");
        drop(a);
        let third = third.await;
        assert_eq!(now(&mut b).await, None);
        drop((b, third));
        assert!(slots.places().held.is_empty() && slots.places().count == 0);

        let hasty = PeerSlots::new(2, Duration::ZERO);
        let enter = async |host: &str| hasty.enter(ip(host)).await.unwrap();
        let (mut a, mut b) = (enter("10.0.0.1").await, enter("10.0.0.2").await);
        let mut c = enter("10.0.0.3").await;
        assert_eq!((now(&mut a).await, now(&mut b).await), (Some(()), None));
        let _again = enter("10.0.0.2").await;
        assert_eq!((now(&mut b).await, now(&mut c).await), (Some(()), None), "its own first");
    }
}
