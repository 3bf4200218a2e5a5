//! Interpolates between cost tables of two micro-batch sizes.

use super::table::{CostTable, LayerTimes, Time};

impl CostTable {
    /// Returns the number of samples per micro-batch with which the table was measured.
    pub fn micro_batch(&self) -> usize {
        self.conditions.micro_batch
    }

    /// Interpolates linearly between this table and another table for the same model.
    ///
    /// # Errors
    /// Fails if the tables have different layers, or `micro_batch` is not between their micro-batch sizes.
    pub fn between(&self, other: &Self, micro_batch: usize) -> Result<Self, String> {
        let (low, high) = (self.micro_batch(), other.micro_batch());
        if !(low <= micro_batch && micro_batch <= high && low < high) {
            return Err(format!(
                "cannot interpolate to a micro-batch of {micro_batch}, which is not between {low} and {high}"
            ));
        }
        let share = (micro_batch - low) as f64 / (high - low) as f64;
        let same = |a: &LayerTimes, b: &LayerTimes| a.name == b.name && a.parameters == b.parameters;
        if self.layers.len() != other.layers.len() || !self.layers.iter().zip(&other.layers).all(|(a, b)| same(a, b)) {
            return Err("the two cost tables have different layers".into());
        }
        let layers = self.layers.iter().zip(&other.layers).map(|(a, b)| LayerTimes {
            inputs: (a.inputs * (high - micro_batch) as u64 + b.inputs * (micro_batch - low) as u64)
                / (high - low) as u64,
            forward: a.forward.towards(b.forward, share),
            backward: a.backward.towards(b.backward, share),
            backward_input: a.backward_input.zip(b.backward_input).map(|(a, b)| a.towards(b, share)),
            backward_weight: a.backward_weight.zip(b.backward_weight).map(|(a, b)| a.towards(b, share)),
            ..a.clone()
        });
        let mut table = Self { layers: layers.collect(), load: self.load.towards(other.load, share), ..self.clone() };
        table.conditions.micro_batch = micro_batch;
        Ok(table)
    }

    /// Returns whether the table has disk rates.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Replaces the disk rates with those of another table.
    pub fn with_disk_of(self, other: &Self) -> Self {
        Self { disk: other.disk, ..self }
    }
}

impl Time {
    fn towards(self, other: Self, share: f64) -> Self {
        let on = |a: f64, b: f64| a + (b - a) * share;
        Self { median: on(self.median, other.median), low: on(self.low, other.low), high: on(self.high, other.high) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::table::Conditions;

    fn table(micro_batch: usize, seconds: f64) -> CostTable {
        let time = Time::of(vec![seconds]);
        CostTable {
            version: crate::costs::table::VERSION,
            conditions: Conditions {
                dtype: "f32".into(),
                threads: 1,
                ranks: 1,
                transport: "none".into(),
                optimizer: "AdamW with 2 states".into(),
                micro_batch,
                tiled_mlp_rows: None,
                sequences: None,
            },
            layers: vec![LayerTimes {
                name: "h.*".into(),
                parameters: 10,
                inputs: 64 * micro_batch as u64,
                forward: time,
                backward: time.scaled(2.0),
                backward_input: None,
                backward_weight: None,
            }],
            slowest_rank: None,
            load: time,
            accumulate: time,
            gradient_norm: time,
            update: time,
            update_matrix: None,
            codes: None,
            transfers: None,
            disk: None,
        }
    }

    #[test]
    fn costs_are_interpolated_between_micro_batch_sizes() {
        let (two, eight) = (table(2, 1.0), table(8, 4.0));
        let four = two.between(&eight, 4).unwrap();
        assert_eq!((four.micro_batch(), four.layers[0].inputs), (4, 256));
        assert_eq!((four.layers[0].forward.median, four.layers[0].backward.median), (2.0, 4.0));
        assert_eq!(four.update, two.update, "an update does not depend on the micro-batch");
        assert_eq!(two.between(&eight, 8).unwrap().layers, eight.layers);
        assert!(two.between(&eight, 16).unwrap_err().contains("not between 2 and 8"));
        let mut other = eight;
        other.layers[0].parameters = 11;
        assert!(two.between(&other, 4).unwrap_err().contains("different layers"));
    }
}
