//! Folds LoRA adapters into the weights of their linear layers: W + s·B·A.

use zero_model::ops::MAGNITUDES;

use crate::manifest::Manifest;

/// The names that PEFT gives the matrices of an adapter.
const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";
/// The prefix of PEFT's names of tensors.
const PEFT_PREFIX: &str = "base_model.model.";
/// The part of PEFT's tensor names that marks the parameters of the base linear layer, not of its adapter.
const BASE_LAYER: &str = ".base_layer.";

/// How adapters are folded into a checkpoint's weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Merge {
    /// Factor s of the products.
    pub scale: f32,
    /// Whether weights are `[inputs, outputs]`, like those of GPT-2's `Conv1D`.
    pub inputs_first: bool,
}

/// Returns whether a parameter belongs to an adapter.
#[must_use]
pub fn is_of_adapter(name: &str) -> bool {
    let ends_with = |end: &str| name.strip_suffix(end).is_some_and(|before| before.ends_with('.'));
    ends_with(A) || ends_with(B) || ends_with(MAGNITUDES)
}

/// Returns the names of the matrices A and B of the linear layer to which the weight `name` belongs, if it has an
/// adapter.
pub(crate) fn matrices(manifest: &Manifest, name: &str) -> Option<[String; 2]> {
    let module = name.strip_suffix("weight").filter(|module| module.ends_with('.'))?;
    let names = [A, B].map(|end| format!("{module}{end}"));
    names.iter().all(|name| manifest.parameters.contains_key(name)).then_some(names)
}

/// Returns PEFT's name of a trained parameter. The bias of a linear layer with an adapter is `…base_layer.bias`.
pub(crate) fn peft_name(manifest: &Manifest, name: &str) -> String {
    match name.strip_suffix(".bias") {
        Some(module) if matrices(manifest, &format!("{module}.weight")).is_some() => {
            format!("{PEFT_PREFIX}{module}{BASE_LAYER}bias")
        }
        _ => format!("{PEFT_PREFIX}{name}"),
    }
}

/// Returns the name of the parameter that PEFT's file calls `name`.
pub(crate) fn of_peft_name(name: &str) -> String {
    name.strip_prefix(PEFT_PREFIX).unwrap_or(name).replace(BASE_LAYER, ".")
}

/// The product s·B·A of one adapter.
pub(crate) struct Product {
    /// `[rank, inputs]` and `[outputs, rank]`.
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
    pub(crate) rank: usize,
    /// The columns of the weight.
    pub(crate) columns: usize,
    pub(crate) merge: Merge,
    /// DoRA's factors, one per output: the magnitude divided by the norm of the output's weights after the product is
    /// added to them.
    pub(crate) factors: Option<Vec<f32>>,
}

impl Product {
    /// Adds the product to consecutive little-endian f32 of the weight, starting at element `start`, and multiplies the
    /// results by DoRA's factors, if any. The sum over the adapter's rank is computed in f64.
    pub(crate) fn add(&self, start: usize, bytes: &mut [u8]) {
        for (at, value) in (start..).zip(bytes.as_chunks_mut().0) {
            let (output, sum) = self.sum(at, *value);
            let factor = self.factors.as_ref().map_or(1.0, |factors| factors[output]);
            *value = (sum * factor).to_le_bytes();
        }
    }

    /// Adds the square of each of these elements of the weight, with the product added, to the sum of its output.
    pub(crate) fn add_squares(&self, start: usize, bytes: &[u8], sums: &mut [f64]) {
        for (at, value) in (start..).zip(bytes.as_chunks().0) {
            let (output, sum) = self.sum(at, *value);
            sums[output] += f64::from(sum).powi(2);
        }
    }

    /// Returns the output to which an element of the weight belongs, and the element with the product added.
    fn sum(&self, at: usize, value: [u8; 4]) -> (usize, f32) {
        let (rank, inputs) = (self.rank, self.a.len() / self.rank);
        let (row, column) = (at / self.columns, at % self.columns);
        let (input, output) = if self.merge.inputs_first { (row, column) } else { (column, row) };
        let terms = (0..rank).map(|k| f64::from(self.b[output * rank + k]) * f64::from(self.a[k * inputs + input]));
        let delta = terms.sum::<f64>() as f32 * self.merge.scale;
        (output, f32::from_le_bytes(value) + delta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lora_products_are_added_to_either_weight_layout() {
        // A = [1 2 3], B = [10; 20], s = 0.5: B·A = [10 20 30; 20 40 60].
        let add = |inputs_first: bool, columns: usize| {
            let merge = Merge { scale: 0.5, inputs_first };
            let (a, b) = (vec![1.0, 2.0, 3.0], vec![10.0, 20.0]);
            let product = Product { a, b, rank: 1, columns, merge, factors: None };
            let mut bytes: Vec<u8> = [100f32; 6].iter().flat_map(|x| x.to_le_bytes()).collect();
            let (first, rest) = bytes.split_at_mut(8);
            product.add(0, first);
            product.add(2, rest);
            bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect::<Vec<_>>()
        };
        assert_eq!(add(false, 3), [105.0, 110.0, 115.0, 110.0, 120.0, 130.0]);
        assert_eq!(add(true, 2), [105.0, 110.0, 110.0, 120.0, 115.0, 130.0]);
        assert!(is_of_adapter("h.0.attn.lora_A.weight") && !is_of_adapter("h.0.flora_A.weight"));
    }
}
