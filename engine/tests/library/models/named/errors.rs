//! Names that do not exist, ambiguous batches and missing gradients are errors. Errors about names list the known ones.

use candle_core::{Result, Tensor};
use candle_nn::loss::{cross_entropy, mse};
use candle_nn::{Linear, Module, VarBuilder, embedding, linear};
use zero_engine::{Batch, Engine, Layers};

use super::{Code, Encoder, Segments, config, features, integers, labels, two_inputs, two_tasks, words};
use crate::world::world;

/// Returns the error of one training step on two ranks.
fn refused(layers: impl Fn() -> Layers + Sync, batch: impl Fn() -> Batch + Sync) -> String {
    let mut errors = world(2, |comm| {
        let mut engine = Engine::with_communicator(config(2, ""), layers(), comm).unwrap();
        engine.train_batch(&batch()).expect_err("a mistake").to_string()
    });
    assert_eq!(errors[0], errors[1]);
    errors.remove(0)
}

#[test]
fn missing_names_are_errors_that_list_the_names() {
    let named = || features(0).target("label", labels(0));
    let misspelt = || {
        let tokens = Layers::new().layer("tokens", |vb: VarBuilder| embedding(61, 12, vb)).inputs(["text"]);
        let segments = |vb: VarBuilder| Ok(Segments(embedding(2, 12, vb)?));
        tokens.layer("segments", segments).with(["segmnt"]).loss(cross_entropy)
    };
    let error = refused(misspelt, named);
    assert!(
        error.contains("layer `segments` takes `segmnt`, which is neither an input of the batch nor an earlier layer"),
        "{error}"
    );
    assert!(
        error.contains("the inputs `text`, `segment`, `pixels`") && error.contains("`tokens`, `segments`"),
        "{error}"
    );
    let error = refused(two_tasks, named);
    assert!(error.contains("the loss takes the target `words`, which the batch does not have"), "{error}");
    assert!(error.contains("the targets `label`"), "{error}");
    let error = refused(two_inputs, || named().target("words", words(0)));
    assert!(error.contains("it has the targets `label`, `words`, but must have exactly one"), "{error}");
    assert!(error.contains("`.loss_of("), "{error}");
    assert!(refused(two_inputs, || features(0)).contains("it has no target"));
    let unnamed = || Batch::new(integers(0, 7, 61), labels(0)).input("text", integers(0, 7, 61));
    let error = refused(two_inputs, move || unnamed().input("segment", integers(0, 7, 2)).input("weight", words(0)));
    assert!(error.contains("layer `tokens` takes named inputs, but the batch has unnamed inputs"), "{error}");
    let first = || Layers::new().layer("tokens", |vb: VarBuilder| embedding(61, 12, vb)).loss(cross_entropy);
    let error = refused(first, named);
    assert!(error.contains("layer `tokens` takes unnamed inputs, but the batch has none"), "{error}");
    let error = refused(two_inputs, move || named().input("mix", words(0)));
    assert!(error.contains("`mix` is an input of the batch and an output of the model"), "{error}");
    assert!(
        refused(two_inputs, move || named().input("text", words(0))).contains("two of its tensors are named `text`")
    );
    let short = words(0).narrow(0, 0, 3).unwrap();
    let error = refused(two_inputs, move || named().input("short", short.clone()));
    assert!(error.contains("`text` has 8 samples, but `short` has 3"), "{error}");
}

/// Passes its input through an operation that cuts the gradient.
struct Cut(Linear);

impl Module for Cut {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(&x.detach())
    }
}

#[test]
fn a_layer_that_cuts_the_gradient_is_found_beside_values_that_bypass_it() {
    // The encoder gets a gradient only from `length`.
    let layers = || {
        Layers::new()
            .layer("encoder", |vb: VarBuilder| linear(6, 12, vb))
            .inputs(["pixels"])
            .layer("topic", |vb: VarBuilder| Ok(Cut(linear(12, 5, vb)?)))
            .layer("length", |vb: VarBuilder| linear(12, 1, vb))
            .inputs(["encoder"])
            .loss_of(["topic", "length"], ["label", "words"], |[topic, length], [label, words]| {
                cross_entropy(topic, label)? + mse(length, words)?
            })
    };
    let batch = || features(0).target("label", labels(0)).target("words", words(0));
    assert!(refused(layers, batch).contains("layer `topic` passes no gradient to the previous layer"));
    // No gradient reaches the encoder from the loss.
    let layers = || {
        Layers::new()
            .layer("encoder", |vb: VarBuilder| linear(6, 1, vb))
            .inputs(["pixels"])
            .layer("length", |vb: VarBuilder| linear(6, 1, vb))
            .inputs(["others"])
            .loss_of(["encoder", "length"], ["words"], |[encoder, length], [words]| {
                mse(&(encoder.detach() + length)?, words)
            })
    };
    assert!(refused(layers, batch).contains("no gradient reaches the outputs of layer `encoder`"));
}

#[test]
fn a_layer_name_refers_to_its_only_output() {
    let encoder = |vb: VarBuilder| {
        let [hidden, mean, variance] = ["hidden", "mean", "variance"].map(|name| vb.pp(name));
        Ok(Encoder([linear(6, 8, hidden)?, linear(8, 2, mean)?, linear(8, 2, variance)?]))
    };
    let layers = move || {
        let encoded = Layers::new().layer("encoder", encoder).inputs(["pixels"]);
        let output = encoded.layer("code", |_: VarBuilder| Ok(Code)).inputs(["encoder", "encoder"]);
        output.loss_of(["code"], ["words"], |[code], [words]| mse(&code.mean_keepdim(1)?, words))
    };
    let error = refused(layers, || features(0).target("words", words(0)));
    assert!(error.contains("a layer's name stands for its only output, and the layer has 2"), "{error}");
}
