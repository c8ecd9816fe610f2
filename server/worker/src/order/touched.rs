//! Objects of a frame, and of many frames together.

use std::collections::HashMap;

use crate::handles::Table;
use crate::objects::Stream;

/// Beside a thread's number, stands for the nodes that it captures; no handle has this kind.
const CAPTURES: u64 = 1 << 62;

/// Objects of a frame, as far as the order between client threads depends on them.
#[derive(Debug, Default)]
pub struct Touched {
    /// Handles, without generation: a frame that reuses a slot stays behind the one that freed it.
    pub objects: Vec<u64>,
    /// Destroys what others may use without naming it, or waits for all streams.
    ///
    /// It stays behind every frame.
    pub everything: bool,
    /// Works on a default stream, which is ordered with every other stream.
    pub every_stream: bool,
    pub some_stream: bool,
    /// Handle of the default stream that it names; 1 for the legacy one.
    pub default: Option<u64>,
    /// Only waits: it must stay behind earlier frames, but no later frame needs to stay behind it.
    pub only_waits: bool,
    /// Every later frame stays behind it.
    pub barrier: bool,
}

impl Touched {
    pub fn object(&mut self, handle: u64) {
        const GENERATION: u64 = 0xffff << 32;
        self.objects.push(handle & !GENERATION);
    }

    pub fn stream(&mut self, streams: &Table<Stream>, handle: u64) {
        if handle <= 2 {
            self.every_stream = true;
            self.some_stream = true;
            self.default = Some(handle.max(1));
        } else {
            self.object(handle);
            // A stream that does not synchronise with the default stream is ordered by its own
            // frames only.
            self.some_stream |= !streams.get(handle).is_ok_and(|s| s.non_blocking);
        }
    }

    /// Keeps the frame behind earlier ones of a thread that captures.
    ///
    /// The order of the nodes would change otherwise, by which an update of a graph finds them.
    pub fn add_to_capture(&mut self, thread: u32) {
        self.objects.push(CAPTURES | u64::from(thread));
    }

    /// Returns `true` if a frame that touches these must stay behind one that touches `earlier`.
    pub fn depends_on(&self, earlier: &Self) -> bool {
        earlier.barrier
            || !earlier.only_waits
                && (self.everything
                    || (self.every_stream && earlier.some_stream)
                    || (self.some_stream && earlier.every_stream)
                    || self.objects.iter().any(|h| earlier.objects.contains(h)))
    }
}

/// Numbers of frames by what they touch.
///
/// A burst of launches leaves tens of thousands of frames behind a blocked one, and each further
/// frame asks whether it depends on one of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sum {
    barriers: usize,
    /// Frames that later ones may have to stay behind; the numbers below count only these.
    works: usize,
    every_stream: usize,
    some_stream: usize,
    objects: HashMap<u64, usize>,
}

impl Sum {
    /// Adds a frame.
    pub fn add(&mut self, frame: &Touched) {
        self.barriers += usize::from(frame.barrier);
        if !frame.only_waits {
            self.works += 1;
            self.every_stream += usize::from(frame.every_stream);
            self.some_stream += usize::from(frame.some_stream);
            for object in &frame.objects {
                *self.objects.entry(*object).or_default() += 1;
            }
        }
    }

    /// Takes a frame away that was added.
    pub fn take(&mut self, frame: &Touched) {
        self.barriers -= usize::from(frame.barrier);
        if !frame.only_waits {
            self.works -= 1;
            self.every_stream -= usize::from(frame.every_stream);
            self.some_stream -= usize::from(frame.some_stream);
            for object in &frame.objects {
                if let Some(number) = self.objects.get_mut(object) {
                    *number -= 1;
                    if *number == 0 {
                        self.objects.remove(object);
                    }
                }
            }
        }
    }

    /// Returns `true` if a later frame depends on one of these: [`Touched::depends_on`] of any.
    pub fn holds(&self, later: &Touched) -> bool {
        self.barriers > 0
            || later.everything && self.works > 0
            || later.every_stream && self.some_stream > 0
            || later.some_stream && self.every_stream > 0
            || later.objects.iter().any(|object| self.objects.contains_key(object))
    }

    /// Returns `true` if one of these frames, which does not only wait, touches an object.
    pub fn touches(&self, object: u64) -> bool {
        self.objects.contains_key(&object)
    }
}
