//! The widths of a parameter in maximal update parametrization (µP): how many times larger its dimensions are than in
//! the base model. The multiplier of a dimension is its size divided by its size in the base model.

/// The widths among a parameter's dimensions: `mup.InfShape`.
#[derive(Debug, Clone, PartialEq)]
pub struct Widths {
    /// Multiplier of each dimension; `None` if the dimension is not a width.
    multipliers: Vec<Option<f64>>,
    /// Whether the first dimension is the fan-in, as in the weight of a [`Conv1D`](zero_ops::Conv1D).
    inputs_first: bool,
}

impl Widths {
    pub(crate) fn new(multipliers: Vec<Option<f64>>, inputs_first: bool) -> Self {
        Self { multipliers, inputs_first }
    }

    /// Returns the number of dimensions that are widths.
    #[must_use]
    pub fn count(&self) -> usize {
        self.multipliers.iter().flatten().count()
    }

    /// Returns the multiplier of the fan-in if two dimensions are widths, the multiplier of the only width, or 1
    /// without widths.
    #[must_use]
    pub fn multiplier(&self) -> f64 {
        let mut widths = self.multipliers.iter().flatten();
        let main = if self.inputs_first { widths.next() } else { widths.next_back() };
        main.copied().unwrap_or(1.0)
    }

    /// Returns the multiplier of the fan-in divided by the multiplier of the fan-out.
    #[must_use]
    pub fn fan_in_to_fan_out(&self) -> f64 {
        let of = |dimension: usize| self.multipliers.get(dimension).copied().flatten().unwrap_or(1.0);
        if self.inputs_first { of(0) / of(1) } else { of(1) / of(0) }
    }
}

#[test]
fn the_first_dimension_of_a_conv1d_is_its_fan_in() {
    let conv = Widths::new(vec![Some(2.0), Some(3.0)], true);
    assert_eq!((conv.multiplier(), conv.fan_in_to_fan_out()), (2.0, 2.0 / 3.0));
}
