//! Errors in a list of layers, and in the selection of parameters for training or of modules for an adapter.

/// An error in building a model.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A layer's constructor failed.
    #[error("cannot build layer `{layer}`: {source}{}", of_values(source))]
    Layer {
        /// The layer's name.
        layer: String,
        /// The constructor's error.
        source: candle_core::Error,
    },
    /// The list of layers is empty.
    #[error("the model has no layers")]
    NoLayers,
    /// The model has neither a loss nor a head.
    #[error("the model has no loss; end it with `.loss(…)` or a `.head(…)`")]
    NoLoss,
    /// Two layers have the same name.
    #[error("two layers are named `{0}`")]
    DuplicateLayer(String),
    /// Two values have the same name.
    #[error("two values are named `{0}`: a layer and an exposed output, or two exposed outputs")]
    DuplicateValue(String),
    /// A layer names a value that the layer itself or a later layer computes.
    #[error("layer `{layer}` takes `{value}`, which is computed by that layer itself or by a later one")]
    LaterValue {
        /// The layer.
        layer: String,
        /// The value.
        value: String,
    },
    /// The loss names an output that no layer computes.
    #[error(
        "the loss takes the output `{output}`, which no layer computes\n  help: the outputs are {}",
        quoted(values)
    )]
    UnknownOutput {
        /// The name.
        output: String,
        /// The names of all outputs.
        values: Vec<String>,
    },
    /// A layer has no inputs.
    #[error("layer `{0}` has no inputs: `.inputs([…])` is empty")]
    NoInputs(String),
    /// Neither a later layer nor the loss takes the outputs of a layer.
    #[error("neither a later layer nor the loss takes the outputs of layer `{0}`")]
    UnusedLayer(String),
    /// A method that describes the layers of the previous call was called before any layer was added.
    #[error("`.{0}([…])` describes the layers of the previous call, but no layer was added before")]
    NoLayerYet(&'static str),
    /// A tie names a parameter that no layer uses.
    #[error("`{owner}` is tied to `{user}`, but no layer has a parameter `{user}`")]
    UnusedTie {
        /// The owner's name.
        owner: String,
        /// The name of the parameter that no layer uses.
        user: String,
    },
    /// A parameter has no elements.
    #[error("parameter `{0}` has no elements")]
    Empty(String),
    /// A pattern for parameter names is malformed.
    #[error("`{pattern}` is not a valid pattern for parameter names: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The reason.
        reason: &'static str,
    },
    /// A pattern matches no parameter.
    #[error("no parameter matches `{pattern}`\n  help: some of the parameters are {}", quoted(names))]
    UnmatchedPattern {
        /// The pattern.
        pattern: String,
        /// Parameter names similar to the pattern.
        names: Vec<String>,
    },
    /// An adapter names a linear layer that the model does not have.
    #[error("the model has no linear layer `{name}`\n  help: its linear layers are {}", quoted(modules))]
    UnknownTarget {
        /// The name.
        name: String,
        /// The last parts of the paths of all linear layers.
        modules: Vec<String>,
    },
    /// An adapter names a module to train that the model does not have.
    #[error("the model has no module `{name}`\n  help: its modules are {}", quoted(modules))]
    UnknownModule {
        /// The name.
        name: String,
        /// The last parts of the paths of all modules with parameters.
        modules: Vec<String>,
    },
    /// The model has no linear layer that can have an adapter.
    #[error(
        "the model has no `ops::Linear` or `ops::Conv1D` that is built from a `VarBuilder`, so it cannot have adapters"
    )]
    NoLinear,
    /// A weight is both quantized and trainable.
    #[error("`{0}` is trained, but quantized weights are frozen")]
    TrainedQuantized(String),
    /// The quantization skips a module that does not exist.
    #[error("the model has no module `{name}`\n  help: its modules are {}", quoted(modules))]
    UnknownSkipped {
        /// The name.
        name: String,
        /// The last parts of the paths of all modules with parameters.
        modules: Vec<String>,
    },
    /// The model has no weight that could be quantized.
    #[error(
        "the model has no `ops::Linear` or `ops::Conv1D` that is built from a `VarBuilder`, so nothing is quantized"
    )]
    NothingQuantized,
    /// A z-loss is configured, but the loss does not support it.
    #[error("the model's loss has no z-loss: it is not a head that computes a softmax")]
    NoZLoss,
    /// The base model of µP, or the wider model that it is compared with, cannot be built.
    #[error("the base model: {0}")]
    Base(Box<Self>),
    /// The base model of µP and the model have different parameters.
    #[error("{0}")]
    BaseShapes(String),
    /// Every parameter is frozen.
    #[error("no parameter is trainable")]
    NothingTrainable,
}

/// Returns the help for a constructor that computes with a parameter. A parameter without values has the dtype F4,
/// which no operation accepts.
fn of_values(source: &candle_core::Error) -> &'static str {
    let is_read = |word: &str| word == "F4";
    match source.to_string().split(|c: char| !c.is_alphanumeric()).any(is_read) {
        true => {
            "\n  help: a constructor cannot compute with parameters, because they have no values yet; compute in the forward pass"
        }
        false => "",
    }
}

/// Lists names in backticks.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
