//! Sums the gradients of micro-batches in one of two fixed orders.

use crate::error::ZeroError;
use crate::grad_buffer::GradBuffer;

/// The order of the sum over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One accumulator, in order of arrival.
    Arrival,
    /// A binary tree over the micro-batches, lowest bit first. The sum over the ranks continues this tree, so the sum
    /// over the global batch does not depend on the number of ranks (`training.reproducible`).
    Tree,
}

/// A sum that accepts one summand at a time.
///
/// It is a stack of partial sums. With `Order::Arrival` the stack has at most one entry. With `Order::Tree` it holds
/// the sums of the complete subtrees so far, like the digits of a binary counter: at most log₂(n) + 1 for n summands.
#[derive(Debug)]
pub(crate) struct Accumulator {
    order: Order,
    /// Pairs (height of a subtree, its sum); lower subtrees are on top.
    stack: Vec<(u32, GradBuffer)>,
}

impl Accumulator {
    pub(crate) fn new(order: Order) -> Self {
        Self { order, stack: vec![] }
    }

    /// Adds a summand. Passes buffers that are no longer needed to `free`.
    pub(crate) fn add(&mut self, summand: GradBuffer, mut free: impl FnMut(GradBuffer)) -> Result<(), ZeroError> {
        self.stack.push((0, summand));
        while let [.., (below, _), (top, _)] = self.stack[..]
            && (self.order == Order::Arrival || below == top)
        {
            self.merge(&mut free)?;
        }
        Ok(())
    }

    /// Takes the total and leaves the accumulator empty. Returns `None` if nothing was added.
    pub(crate) fn take(&mut self, mut free: impl FnMut(GradBuffer)) -> Result<Option<GradBuffer>, ZeroError> {
        while self.stack.len() > 1 {
            self.merge(&mut free)?;
        }
        Ok(self.stack.pop().map(|(_, sum)| sum))
    }

    fn merge(&mut self, free: &mut impl FnMut(GradBuffer)) -> Result<(), ZeroError> {
        let Some((height, newer)) = self.stack.pop() else { return Ok(()) };
        let Some((below, older)) = self.stack.last_mut() else { return Ok(()) };
        older.add(&newer)?;
        *below = height.max(*below) + 1;
        free(newer);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(value: f32) -> GradBuffer {
        GradBuffer::F32(vec![value].into())
    }

    fn sum(order: Order, values: &[f32]) -> f32 {
        let mut accumulator = Accumulator::new(order);
        values.iter().for_each(|&v| accumulator.add(kept(v), drop).unwrap());
        accumulator.take(drop).unwrap().unwrap().into_f32().unwrap().host().unwrap()[0]
    }

    fn tree(values: &[f32]) -> f32 {
        let mut level = values.to_vec();
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap()).collect();
        }
        level[0]
    }

    #[test]
    fn sums_follow_the_order_of_arrival_or_of_the_tree() {
        let values: Vec<f32> = (0..23).map(|i| 1.0 / (1 + i * i) as f32).collect();
        for n in 1..=values.len() {
            let arrival = values[..n].iter().copied().reduce(|a, b| a + b).unwrap();
            assert_eq!(sum(Order::Arrival, &values[..n]).to_bits(), arrival.to_bits());
            assert_eq!(sum(Order::Tree, &values[..n]).to_bits(), tree(&values[..n]).to_bits(), "{n}");
        }
    }

    #[test]
    fn a_tree_sum_holds_few_buffers() {
        let mut accumulator = Accumulator::new(Order::Tree);
        for n in 1..=64u32 {
            accumulator.add(kept(1.0), drop).unwrap();
            assert_eq!(accumulator.stack.len() as u32, n.count_ones());
        }
    }
}
