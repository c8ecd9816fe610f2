//! A search through all states of a small model, for tests.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A model: a state, and the steps that any of its threads or the network can take.
pub trait Model: Sized {
    type Step: Copy + Debug;

    fn copy(&self) -> Self;
    /// Adds everything that later steps depend on.
    fn hash(&self, hasher: &mut impl Hasher);
    /// Returns the steps that are possible now.
    fn steps(&self) -> Vec<Self::Step>;
    /// Takes a step; an error breaks the model's promise.
    fn take(&mut self, step: Self::Step) -> Result<(), String>;
    /// Returns `true` for a step of which nothing may depend.
    fn is_fault(step: Self::Step) -> bool;
    /// Returns `true` if all work is done.
    fn is_done(&self) -> bool;
}

/// Size of a search.
#[derive(Debug)]
pub struct Searched {
    pub states: usize,
    /// States in which all work is done.
    pub done: usize,
}

/// Visits every state; the work ends from each of them without another fault, in every order.
///
/// It can end from each state, and no steps lead back to where they began. A step that changes
/// nothing is a thread that looks in vain; the others are supposed to come in between.
/// An error names the steps to a state that breaks a promise.
pub fn search<M: Model>(first: M) -> Result<Searched, String> {
    let key = |model: &M| {
        let mut hasher = DefaultHasher::new();
        model.hash(&mut hasher);
        hasher.finish()
    };
    // By number: the state before and the step from it.
    let mut ways: Vec<Option<(usize, M::Step)>> = vec![None];
    let story = |ways: &[Option<(usize, M::Step)>], mut at: usize| {
        let mut steps = Vec::new();
        while let Some((before, step)) = ways[at] {
            steps.push(format!("{step:?}"));
            at = before;
        }
        steps.reverse();
        steps.join(", ")
    };
    let mut known = HashMap::from([(key(&first), 0)]);
    // By number: the states from which a step without a fault leads here.
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut done = Vec::new();
    let mut open = vec![(0, first)];
    while let Some((number, model)) = open.pop() {
        if model.is_done() {
            done.push(number);
        }
        for step in model.steps() {
            let mut next = model.copy();
            next.take(step).map_err(|e| format!("{e}, after {}, {step:?}", story(&ways, number)))?;
            let there = match known.entry(key(&next)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(vacant) => {
                    vacant.insert(ways.len());
                    // Takes less memory than what was stepped.
                    open.push((ways.len(), next.copy()));
                    ways.push(Some((number, step)));
                    before.push(Vec::new());
                    ways.len() - 1
                }
            };
            if !M::is_fault(step) && there != number {
                before[there].push(number);
            }
        }
    }
    let searched = Searched { states: ways.len(), done: done.len() };
    let mut ends = vec![false; ways.len()];
    let mut rest = done;
    while let Some(number) = rest.pop() {
        if !std::mem::replace(&mut ends[number], true) {
            rest.append(&mut before[number]);
        }
    }
    if let Some(stuck) = ends.iter().position(|ends| !ends) {
        return Err(format!("the work cannot end after {}", story(&ways, stuck)));
    }
    match circle(&before) {
        Some(circle) => Err(format!("the work may never end after {}", story(&ways, circle))),
        None => Ok(searched),
    }
}

/// Returns a state of a circle of steps, or one before it; `before` has the steps backwards.
fn circle(before: &[Vec<usize>]) -> Option<usize> {
    let mut steps = vec![0_usize; before.len()];
    for from in before.iter().flatten() {
        steps[*from] += 1;
    }
    // States without a step, and then those whose steps all lead to such states.
    let mut last: Vec<usize> = (0..before.len()).filter(|number| steps[*number] == 0).collect();
    while let Some(number) = last.pop() {
        for from in &before[number] {
            steps[*from] -= 1;
            if steps[*from] == 0 {
                last.push(*from);
            }
        }
    }
    steps.iter().position(|steps| *steps > 0)
}

/// A network in memory whose connections the model cuts at will.
///
/// A connection has two ends, 0 for the program and 1 for the worker.
#[derive(Debug, Clone, Default, Hash)]
pub struct Net {
    pub connections: Vec<Connection>,
}

#[derive(Debug, Clone, Default, Hash)]
pub struct Connection {
    /// Bytes under way or received, by the end that receives them.
    pub bytes: [Vec<u8>; 2],
    /// Whether no further byte passes.
    pub cut: bool,
    /// Whether an end knows that.
    pub ended: [bool; 2],
}

/// Bytes under way that a cut takes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    Nothing,
    /// Part of the last frame.
    Part,
    All,
}

impl Net {
    /// Cuts a connection; its ends learn that later.
    pub fn cut(&mut self, connection: usize, losses: [Loss; 2]) {
        let connection = &mut self.connections[connection];
        connection.cut = true;
        for (bytes, loss) in connection.bytes.iter_mut().zip(losses) {
            bytes.truncate(match loss {
                Loss::Nothing => bytes.len(),
                Loss::Part => bytes.len().saturating_sub(20),
                Loss::All => 0,
            });
        }
    }

    /// Ends a connection at one end; the other one learns of it later.
    pub fn end(&mut self, connection: usize, end: usize) {
        let connection = &mut self.connections[connection];
        (connection.cut, connection.ended[end]) = (true, true);
    }
}

#[test]
fn circles_of_steps_are_found() {
    // By state: those before it. Two ways lead from the first state to the last one.
    assert_eq!(circle(&[vec![], vec![0], vec![0], vec![1, 2]]), None);
    // The second and third state lead to each other, and to the last one.
    assert_eq!(circle(&[vec![], vec![0, 2], vec![1], vec![2]]), Some(0));
}
