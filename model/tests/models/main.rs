//! Tests of models: the zoo, golden results, and the planned memory of layers. One file per subject.

#[path = "../../../ops/tests/ops/check.rs"]
#[allow(dead_code, reason = "the tests of operations use all of it")]
mod check;
mod decoding;
mod golden;
mod memory;
mod sliding_window;
mod zoo;

use candle_core::DType;
use zero_model::{Layers, Model};

/// Returns the model with its initial values.
fn built(layers: Layers, dtype: DType) -> Model {
    let model = layers.build(dtype).unwrap();
    for parameter in model.parameters() {
        let mut values = vec![0.0; parameter.elements()];
        parameter.initialise(3, 0, &mut values);
        parameter.fill_from_floats(values).unwrap();
    }
    model
}
